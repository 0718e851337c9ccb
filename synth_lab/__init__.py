"Notebook-first research on language-model agents in Crafter: rollouts, traces, fine-tuning and RL in one closed loop"
__version__ = "0.1.0"

import importlib

# Each public name and the module that holds it; a name is imported when it is first used, so that `import synth_lab` stays cheap
_PUBLIC = {
    'LabError': 'core', 'settings': 'core',
    'World': 'world', 'ACTIONS': 'world', 'ACHIEVEMENTS': 'world',
    'Observation': 'view',
    'InferenceClient': 'client', 'AsyncInferenceClient': 'client',
    'LearningClient': 'jobs',
    'Agent': 'agent',
    'Store': 'traces',
    'Filter': 'filters',
    'Lab': 'lab',
}
__all__ = list(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC: raise AttributeError(f'synth_lab has no {name!r}; it has {", ".join(_PUBLIC)} and its modules')
    return getattr(importlib.import_module(f'.{_PUBLIC[name]}', __name__), name)


def __dir__(): return [*globals(), *_PUBLIC]
