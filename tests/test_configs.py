"What the notebooks on configurations should not carry: every key of the older files and what becomes of it, and every way to write one wrongly"
import os, sqlite3
from pathlib import Path
from types import SimpleNamespace

import pytest
from fastapi import FastAPI, File, Form, Request, UploadFile

from synth_lab import configs as c
from synth_lab.client import endpoint
from synth_lab.configs import ConfigError, EvalConfig, FilterConfig, RLConfig, SFTConfig, SmokeConfig, kind_of, launch, open_traces, read_toml, stand_in
from synth_lab.filters import FilterError
from synth_lab.jobs import LearningClient
from synth_lab.lab import Lab
from synth_lab.policies import init_weights, save_checkpoint
from synth_lab.tables import _inner
from synth_lab.train import read_examples, sft

EXAMPLES = Path(__file__).parents[1]/'nbs/pipeline/configs'

@pytest.fixture
def toml(tmp_path):
    "Write a TOML file"
    def write(text, name='a.toml'):
        (tmp_path/name).write_text(text)
        return tmp_path/name
    return write

@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    "A lab with one fine-tuned model and a few traces"
    lab = Lab(tmp_path_factory.mktemp('lab')/'lab', 'local')
    save_checkpoint(lab.models_path, 'ft:student:job_one', init_weights(8, 0), base='student')
    lab.rollout_sync('expert', range(3), max_turns=4, split='train')
    return lab

EVAL,FILTER = 'model = "expert"\n','output = "a.jsonl"\n'
SFT = '[job]\nmodel = "student"\ndata = "a.jsonl"\n'
RL = '[policy]\nsource = "student"\n'

# Every key: what it changes, what it is refused with, or that it is noted

HONOURED = [
    ('app_id = "grpo-crafter"', lambda o: o.app_id, 'grpo-crafter'), ('seeds = [3, 1]', lambda o: o.seeds, [3, 1]),
    ('seeds = "0-2, 9"', lambda o: o.seeds, [0, 1, 2, 9]),
    ('task_app_url = "http://127.0.0.1:8001"', lambda o: o.url, 'http://127.0.0.1:8001'),
    ('task_app_url = "https://YOUR-APP.modal.run"', lambda o: o.url, None),
    ('split = "eval"', lambda o: o.how['split'], 'eval'), ('max_turns = 7', lambda o: o.turns, 7), ('max_llm_calls = 7', lambda o: o.turns, 7),
    ('max_turns = 7\nmax_llm_calls = 4', lambda o: o.turns, 4), ('policy_config = {max_llm_calls = 3}\nmax_turns = 7', lambda o: o.turns, 3),
    ('env_config = {env_params = {max_steps_per_episode = 6}}\nmax_turns = 7', lambda o: o.turns, 6),
    ('ops = ["agent", "env", "policy", "step"]', lambda o: o.turns, 2),
    ('max_turns = 50', lambda o: o.length, 400), ('env_config = {length = 99}', lambda o: o.length, 99), ('concurrency = 4', lambda o: o.how['concurrency'], 4),
    ('env_config = {difficulty = "easy"}', lambda o: o.how['difficulty'], 'easy'),
    ('metadata = ["difficulty=easy"]', lambda o: o.metadata, dict(difficulty='easy')),
    ('metadata = {trees = 3}', lambda o: o.metadata, dict(trees=3)), ('metadata_sql = "SELECT 1"', lambda o: o.metadata_sql, 'SELECT 1'),
    ('env_file = ".env"', lambda o: o.env_file, ['.env']),
    ('policy_config = {provider = "groq"}', lambda o: o.endpoint, 'groq'),
    ('policy_config = {inference_url = "http://127.0.0.1:1/v1"}', lambda o: o.endpoint, 'http://127.0.0.1:1/v1'),
    ('inference_url = "http://127.0.0.1:1/v1"', lambda o: o.endpoint, 'http://127.0.0.1:1/v1'), ('temperature = 0.3', lambda o: o.agent, dict(temperature=.3)),
    ('policy = {temperature = 0.3}', lambda o: o.agent, dict(temperature=.3)), ('policy_config = {temperature = 0.3}', lambda o: o.agent, dict(temperature=.3)),
    ('policy_config = {top_p = 0.8}', lambda o: o.agent, dict(top_p=.8)), ('max_tokens = 512', lambda o: o.agent, dict(max_tokens=512)),
    ('policy_config = {max_completion_tokens = 5}', lambda o: o.agent, dict(max_tokens=5)),
    ('policy_config = {use_vision = true}', lambda o: o.agent, dict(use_vision=True)),
    ('policy_config = {use_vision = true, image_only_mode = true}', lambda o: o.agent, dict(use_vision=True, image_only_mode=True)),
    ('tool_choice = "required"', lambda o: o.agent, dict(tool_choice='required')),
    ('policy_config = {thinking_mode = "no_think"}', lambda o: o.agent, dict(thinking=False)),
    ('policy_config = {thinking_budget = 9}', lambda o: o.agent, dict(extra=dict(thinking_budget=9))),
    ('reasoning_effort = "low"', lambda o: o.agent, dict(extra=dict(reasoning_effort='low'))),
    ('system_hint = "Look twice."', lambda o: o.agent['system'].endswith('\n\nLook twice.'), True),
    ('policy_config = {use_tools = true}', lambda o: o.agent, {}),
    ('env_name = "crafter"\npolicy_name = "crafter-react"', lambda o: (o.env_name, o.policy_name), ('crafter', 'crafter-react')),
    ('policy_config = {step_rewards = {enabled = true, mode = "decision_stepwise", indicator_lambda = 2}}', lambda o: o.step_rewards.indicator_lambda, 2),
    ('env_config = {step_rewards = {enabled = false}}', lambda o: o.step_rewards, None),
    ('env_config = {step_rewards = {enabled = true, mode = "off"}}', lambda o: o.step_rewards, None)]

@pytest.mark.parametrize('text,what,value', HONOURED)
def test_a_key_of_eval_is_honoured(toml, text, what, value): assert what(EvalConfig.load(toml(f'[eval]\n{EVAL}{text}'))) == value

@pytest.mark.parametrize('text', ['trace_format = "compact"', 'return_trace = false', 'policy_config = {trace_correlation_id = "a"}'])
def test_a_key_of_eval_that_is_for_task_apps_is_noted(toml, text):
    key = text.split(' = {')[-1].split(' =')[0]
    assert [o for o in EvalConfig.load(toml(f'[eval]\n{EVAL}{text}')).notes if key in o]

RULES = [('splits = ["train"]', dict(splits=['train'])), ('splits = "train"', dict(splits=['train'])), ('models = ["a"]', dict(models=['a'])),
    ('min_official_score = 0.1', dict(min_achievements=1)),
    ('min_official_score = 2', dict(min_achievements=2)), ('max_official_score = 2.5', dict(max_achievements=2)),
    ('min_judge_scores = {style = 0.5}', dict(min_judge_scores=dict(style=.5))),
    ('max_judge_scores = {style = 1}', dict(max_judge_scores=dict(style=1))), ('limit = 3', dict(limit=3)), ('offset = 2', dict(offset=2)),
    ('shuffle = true\nshuffle_seed = 4', dict(shuffle=True, shuffle_seed=4)),
    ('min_created_at = "2025-01-01"', dict(min_created_at='2025-01-01')), ('max_created_at = 1700000000', dict(max_created_at=1700000000)),
    ('require_any = ["collect_wood"]', dict(require_any=['collect_wood'])),
    ('dedupe = true', dict(dedupe=True)), ('granularity = "window"\nwindow = 2', dict(granularity='window', window=2))]

@pytest.mark.parametrize('text,rules', RULES)
def test_a_key_of_filter_is_a_rule(toml, text, rules): assert FilterConfig.load(toml(f'[filter]\n{FILTER}{text}')).rules == rules

SMOKE = dict(task_url='"http://a"', env_name='"crafter"', policy_name='"react"', max_steps='7', policy='"openai"', model='"m"', mock_backend='"openai"',
    mock_port='1', return_trace='true', use_mock='false',
    inference_url='"http://a"', api_key='"k"', task_app_name='"crafter"', task_app_port='1', task_app_env_file='".env"')

@pytest.mark.parametrize('key', SMOKE)
def test_a_key_of_smoke_is_honoured(toml, key):
    o = SmokeConfig.load(toml(f'[smoke]\n{key} = {SMOKE[key]}'))
    assert getattr(o, key) == read_toml(toml(f'a = {SMOKE[key]}'))['a'] and not o.notes

@pytest.mark.parametrize('text', ['task_app_force = true', 'sqld_auto_start = true', 'sqld_db_path = "a"', 'sqld_hrana_port = 1', 'sqld_http_port = 1'])
def test_a_key_of_smoke_that_starts_or_ends_others_is_noted(toml, text): assert text.split()[0] in SmokeConfig.load(toml(f'[smoke]\n{text}')).notes[0]

TRAINED = [ # of the box: (class, text, key of the job, value)
    (SFTConfig, '[hyperparameters]\nn_epochs = 3', 'n_epochs', 3), (SFTConfig, '[hyperparameters]\nbatch_size = 8', 'batch_size', 8),
        (SFTConfig, '[hyperparameters]\nglobal_batch = 8', 'batch_size', 8),
    (SFTConfig, '[hyperparameters]\nper_device_batch = 2\ngradient_accumulation_steps = 3\nworld_size = 4', 'batch_size', 24),
    (SFTConfig, '[hyperparameters]\nlearning_rate = 1e-3', 'learning_rate', 1e-3),
    (SFTConfig, '[training.validation]\nenabled = false', 'val_split', 0),
    (SFTConfig, '[hyperparameters]\nn_epochs = 3\n[training.validation]\nenabled = true', 'patience', 3),
    (SFTConfig, '[policy]\nlabel = "my model/1"', 'suffix', 'my-model-1'), (SFTConfig, '[tags]\na = 1', 'metadata', dict(tags=dict(a=1))),
    (RLConfig, '[algorithm]\nvariety = "gspo"', 'advantage', 'episode'), (RLConfig, '[algorithm]\nvariety = "grpo"', 'advantage', 'group'),
    (RLConfig, '', 'advantage', 'gae'),
    (RLConfig, '[rollout]\nmax_turns = 10', 'length', 80), (RLConfig, '[rollout]\nmax_turns = 10\n[training]\nmax_turns = 5', 'length', 40),
    (RLConfig, '[rollout]\nops = ["agent", "env"]', 'length', 8),
    (RLConfig, '[rollout.env_config.env_params]\nmax_steps_per_episode = 3', 'length', 24),
    (RLConfig, '[rollout]\nepisodes_per_batch = 16\nbatches_per_step = 2', 'worlds', 32),
    (RLConfig, '[training]\nnum_epochs = 2\niterations_per_epoch = 3', 'iterations', 6), (RLConfig, '[training]\ngroup_size = 4', 'group_size', 4),
    (RLConfig, '[training]\nbatch_size = 4', 'batch_size', 4),
    (RLConfig, '[training]\nlearning_rate = 1e-4', 'learning_rate', 1e-4), (RLConfig, '[evaluation]\nevery_n_iters = 5\nseeds = [0, 2]', 'checkpoint_every', 5),
    (RLConfig, '[evaluation]\nseeds = [0, 2]', 'seeds', [1, *range(3, 202)]), (RLConfig, '[training]\nstep_rewards_enabled = true', 'reward', 'turn'),
    (RLConfig, '[training.rewards]\nstep_rewards_enabled = true\nstep_rewards_strategy = "per_achievement"\nstep_rewards_weights = {collect_wood = 2}',
    'step_rewards', dict(strategy='per_achievement', weights=dict(collect_wood=2.))),
    (RLConfig, '[training]\nstep_rewards_enabled = true\nevent_rewards_kind = "absolute"\nstep_rewards_indicator_lambda = 0.5', 'step_rewards',
    dict(mode='absolute', indicator_lambda=.5)),
    (RLConfig, '[rollout.env_config.step_rewards]\nenabled = true\nk_limits = {collect_wood = 2}\nstep_beta = 0.0', 'step_rewards',
    dict(k_limits=dict(collect_wood=2))),
    (RLConfig, '[judge]\nenabled = true\n[judge.reward_blend]\nenv = 0.5', 'blend', dict(env=.5, event=0., outcome=0.)),
    (RLConfig, '[model]\nlabel = "a"', 'suffix', 'a'), (RLConfig, '[rubric]\nenabled = false\n[rubric.weights]\nevent = 1', 'kind', 'rl')]

@pytest.mark.parametrize('cls,text,key,value', TRAINED)
def test_a_key_of_training_is_honoured_in_the_box(toml, lab, cls, text, key, value):
    base = SFT if cls is SFTConfig else RL
    if text.startswith('[policy]'): base = base.replace(RL, '') or '[model]\nsource = "student"\n'
    assert cls.load(toml(f'{base}{text}')).asked(lab)[0][key] == value

NOTED = [(SFTConfig, o) for o in ('[compute]\ngpu_type = "H100"\ngpu_count = 4\nnodes = 1', '[data.topology]\ncontainer_count = 4',
    '[training]\nmode = "lora"', '[training]\nuse_qlora = true', '[training.lora]\nr = 1', '[lora]\nr = 1',
    '[training.validation]\nevaluation_strategy = "steps"', '[training.validation]\neval_steps = 3', '[hyperparameters]\nsequence_length = 9',
    '[hyperparameters]\nwarmup_ratio = 0.1', '[hyperparameters]\nweight_decay = 0.1',
    '[hyperparameters]\ntrain_kind = "peft"', '[hyperparameters.parallelism]\nbf16 = true')] + [(RLConfig, o) for o in ('[services]\ntask_url = "http://a"',
    '[services]\njudge_url = "http://a"', '[topology]\ntensor_parallel = 1',
    '[vllm]\nmax_model_len = 9', '[reference]\nplacement = "none"', '[rollout]\nmax_concurrent_rollouts = 4', '[training]\nlog_interval = 1',
    '[training]\nweight_sync_interval = 1', '[training.weight_sync]\nenable = true',
    '[training]\nmax_completion_tokens = 9', '[training]\nasync_semaphore_max = 4', '[training]\ngradient_accumulation_steps = 2',
    '[training]\nmax_accumulated_minibatch = 2', '[rollout.policy_config]\ntemperature = 0.2', '[model]\ntrainer_mode = "lora"')]

@pytest.mark.parametrize('cls,text', NOTED)
def test_a_key_of_machines_is_noted_in_the_box(toml, lab, cls, text):
    table,_,keys = text.partition('\n')
    name = [*table.strip('[]').split('.'), keys.split(' =')[0]]
    notes = ' '.join(cls.load(toml(f'{SFT if cls is SFTConfig else RL}{text}')).asked(lab)[1])
    assert any(f'`{".".join(name[:n])}`' in notes for n in range(1, len(name)+1))

REFUSED = [(EvalConfig, o, why) for o,why in {'env_config = {seed = 3}':'write the worlds into `seeds`', 'env_config = {index = 3}':'`seeds`',
    'policy_config = {use_tools = false}':'use_tools',
    'env_config = {step_rewards = {step_beta = 0.1}}':'step_beta',
    'env_config = {step_rewards = {weights = {craft_table = 1}}}':'no achievement `craft_table`', 'ops = ["env", "agent"]':'agent is due',
    'policy_config = {image_only_mode = true}':'use_vision', 'policy_config = {max_tokens = 3, max_completion_tokens = 4}':'contradict',
    'policy_config = {model = "student"}':'said twice',
    'temperature = 0.1\npolicy_config = {temperature = 0.2}':'said twice', 'env_config = {difficulty = "brutal"}':'no difficulty',
    'env_config = {dificulty = "easy"}':'mean `difficulty`', 'seeds = [1, 1]':'there twice', 'seeds = []':'seeds', 'seeds = "a"':'0,1,2 or 0-9,12',
    'metadata = ["easy"]':'key=value'}.items()] + [(FilterConfig, o, why) for o,why in {'task_ids = ["a"]':'use `seeds`', 'shuffle_seed = 3':'shuffle = true',
    'min_official_score = 3\nmax_official_score = 2':'min_official_score=3 is above max_official_score=2',
    'min_official_score = 1\nmin_achievements = 1':'same rule', 'min_created_at = "yesterday"':'`min_created_at` keeps',
    'max_created_at = nan':'max_created_at=nan',
    'require_any = ["wood"]':'no achievement'}.items()] + [(RLConfig, o, why) for o,why in {
    '[judge]\ntype = "a"':'is gone', '[judge]\ntimeout_s = 3':'[judge.options]', '[judge.options]\nmax_concurrency = 3':'is gone',
        '[judge.options]\ntracks = ["a"]':'is gone', '[rubric]\napi_base = "a"':'settings.ini',
    '[training]\nstep_rewards_beta = 0.1':'step_rewards_beta', '[training]\nstep_rewards_strategy = "consistent"':'nothing says whether',
    '[evaluation]\ninstances = 3\nseeds = [1]':'3 instances of 1 seeds', '[model]\nbase = "b"':'said twice',
    '[training]\ngroup_size = 1':'group_size', '[rollout]\nrubric_rewards_only = true\ntask_app_origin_rewards_only = true':'no reward',
    '[rollout]\nops = []':'ops', '[algorithm]\nvariety = "dpo"':'variety', '[training]\nevent_rewards_kind = "absolute"':'counts for the pay'}.items()]

@pytest.mark.parametrize('cls,text,why', REFUSED)
def test_a_key_that_cannot_be_meant_is_refused_by_name(toml, cls, text, why):
    base = {EvalConfig:f'[eval]\n{EVAL}', FilterConfig:f'[filter]\n{FILTER}', RLConfig:RL}[cls]
    with pytest.raises(ConfigError) as e: cls.load(toml(base + text))
    assert why in str(e.value) and e.value.fix and str(e.value).startswith(str(toml(base + text)))

# Wrong files

@pytest.mark.parametrize('text,why', [('[eval\n', 'line 1, column 6'), ('[eval]\nmodel = expert', 'line 2, column 9'), ('a = 1\na = 2\nb = 3', 'line 2'),
    ('[eval]\nseeds = [1,', 'line 2, column 12, where the file ends')])
def test_what_is_no_toml_is_said_with_its_place(toml, text, why):
    with pytest.raises(ConfigError, match=why): EvalConfig.load(toml(text))

def test_a_file_that_cannot_be_read(tmp_path):
    (tmp_path/'latin.toml').write_bytes(b'[eval]\nmodel = "caf\xe9"')
    for path,why in ((tmp_path/'no.toml', 'No such file'), (tmp_path, 'Is a directory'), (tmp_path/'latin.toml', 'line 2, column 13')):
        with pytest.raises(ConfigError, match=why): EvalConfig.load(path)

def test_windows_line_ends_and_a_mark_of_byte_order_do_no_harm(tmp_path):
    (tmp_path/'a.toml').write_bytes(b'\xef\xbb\xbf[eval]\r\nmodel = "expert"\r\nmax_turns = 3\r\n')
    assert EvalConfig.load(tmp_path/'a.toml').turns == 3

@pytest.mark.parametrize('cls,text,near', [(EvalConfig, f'[eval]\n{EVAL}max_turn = 3', 'max_turns'),
    (EvalConfig, f'[eval]\n{EVAL}env_config = {{env_params = {{max_steps = 3}}}}', 'max_steps_per_episode'),
    (EvalConfig, f'[eval]\n{EVAL}policy_config = {{temprature = 1}}', 'temperature'), (EvalConfig, f'[evl]\n{EVAL}', 'write [eval]'),
    (FilterConfig, f'[filter]\n{FILTER}min_oficial_score = 1', 'min_official_score'),
    (SmokeConfig, '[smoke]\nmax_step = 1', 'max_steps'), (SFTConfig, f'{SFT}[hyperparameters]\nlerning_rate = 1', 'learning_rate'),
    (SFTConfig, f'{SFT}[compte]\nnodes = 1', 'compute'),
    (RLConfig, f'{RL}[training.weight_sync]\nenabled = true', 'enable'), (RLConfig, f'{RL}[rollouts]\nmax_turns = 1', 'rollout')])
def test_an_unknown_key_is_an_error_with_the_nearest_one(toml, cls, text, near):
    with pytest.raises(ConfigError) as e: cls.load(toml(text))
    assert near in str(e.value)

@pytest.mark.parametrize('value', ['"3"', 'true', 'nan', '0', '-1', '2.5', '[3]'])
def test_a_number_that_is_none_is_an_error_everywhere(toml, value):
    for cls,text in ((EvalConfig, f'[eval]\n{EVAL}concurrency = {value}'), (FilterConfig, f'[filter]\n{FILTER}limit = {value}'),
        (SmokeConfig, f'[smoke]\nmax_steps = {value}'),
            (SFTConfig, f'{SFT}[hyperparameters]\nn_epochs = {value}'), (RLConfig, f'{RL}[training]\nbatch_size = {value}')):
        with pytest.raises(ConfigError): cls.load(toml(text))

def every_key(cls, above=()):
    "The keys of a configuration, with those of its tables"
    for k,f in cls.model_fields.items():
        yield (*above, k)
        if (inner := _inner(f.annotation)) and len(above) < 4: yield from every_key(inner, (*above, k))

@pytest.mark.parametrize('cls', [EvalConfig, FilterConfig, SFTConfig, RLConfig, SmokeConfig])
def test_whatever_a_key_holds_it_is_taken_or_refused(cls):
    "Nothing else is raised, now or when the configuration is read"
    least = {EvalConfig:dict(model='expert'), FilterConfig:dict(output='a.jsonl'), SFTConfig:dict(model='student'), RLConfig:dict(model='student')}.get(cls, {})
    taken = refused = 0
    for *above,key in every_key(cls):
        for value in (-1, 1.5, float('nan'), '', 'x', True, [], [1], {}, {'a':1}, 10**30):
            inner = {key:value}
            for k in reversed(above): inner = {k:inner}
            try: made = cls(**least | inner)
            except ConfigError: refused += 1
            else: taken,_ = taken+1,(made.notes, [getattr(made, k, None) for k in ('rules', 'how', 'wire', 'blend', 'turn_pay')])
    assert 10 < taken < refused

def test_what_is_missing_is_said(toml):
    for cls,text,why in ((EvalConfig, '[eval]', 'lacks `model`'), (FilterConfig, '[filter]', 'lacks `output`'), (SFTConfig, '', 'no model to fine-tune'),
        (RLConfig, '', 'no model to start from'), (SmokeConfig, RL, 'no table [smoke]')):
        with pytest.raises(ConfigError) as e: cls.load(toml(text))
        assert why in str(e.value)

def test_a_key_may_not_be_shown(toml):
    assert 'geheim' not in repr(SmokeConfig.load(toml('[smoke]\napi_key = "geheim"')))

# Who wins

def test_what_is_given_beats_the_file_also_where_it_is_the_default(toml):
    assert EvalConfig.load(toml(f'[eval]\n{EVAL}concurrency = 7\nseeds = [9]'), concurrency=1, seeds='0-4').concurrency == 1
    assert EvalConfig.load(toml(f'[eval]\n{EVAL}split = "eval"'), split='train').split == 'train'
    assert SmokeConfig.load(toml('[smoke]\nmax_steps = 10\npolicy_name = "crafter-react"'), max_steps=3,
        policy_name='react').model_dump() == SmokeConfig().model_dump()
    assert FilterConfig.load(toml(f'[filter]\n{FILTER}shuffle = true'), shuffle=False).rules == dict(shuffle=False)
    assert FilterConfig.load(toml(f'[filter]\n{FILTER}min_official_score = 2'), min_achievements=5).rules == dict(min_achievements=5)
    assert FilterConfig.load(toml(f'[filter]\n{FILTER}min_achievements = 2'), min_official_score=5).rules == dict(min_achievements=5)

def test_what_is_not_given_leaves_the_file(toml):
    assert EvalConfig.load(toml(f'[eval]\n{EVAL}concurrency = 7'), concurrency=None, model=None).concurrency == 7
    assert EvalConfig.load(None, model='expert').seeds == [0, 1, 2, 3, 4]

def test_a_given_model_stands_for_each_that_a_file_names(toml):
    text = '[eval]\nmodel = "a"\n[eval.policy_config]\nmodel = "a"'
    assert EvalConfig.load(toml(text), model='b').model == 'b' and EvalConfig.load(toml(text), model='b').wire['policy']['model'] == 'b'
    assert SFTConfig.load(toml('[job]\nmodel = "a"\n[policy]\nmodel_name = "a"'), model='b', dataset='d.jsonl').model == 'b'
    for t in ('[model]\nbase = "a"\nlabel = "l"', '[policy]\nmodel_name = "a"',
        '[model]\nsource = "a"\n[policy]\nsource = "a"'): assert RLConfig.load(toml(t), model='b').start == 'b'

def test_a_bad_value_that_was_given_does_not_blame_the_file(toml):
    with pytest.raises(ConfigError) as e: EvalConfig.load(toml(f'[eval]\n{EVAL}'), concurrency=0)
    assert 'a.toml' not in str(e.value)

# Where what is not here is played by what is

@pytest.mark.parametrize('model,use,stands', [('qwen/qwen3-32b', 'play', 'expert'), ('peft:Qwen/Qwen3-4B:job_f7', 'play', 'ft:student:job_one'),
    ('fft:REPLACE-WITH-SFT-JOB-ID', 'play', 'ft:student:job_one'),
    ('Qwen/Qwen3-4B', 'sft', 'student'), ('Qwen/Qwen3-4B', 'rl', 'ft:student:job_one'), ('qft:a:b', 'rl', 'ft:student:job_one')])
def test_a_model_that_is_elsewhere_is_played_by_one_of_the_box(lab, model, use, stands):
    found,note = stand_in(model, lab, use)
    assert found == stands and model in note and stands in note

def test_a_model_that_is_there_plays_itself(lab):
    for o in ('expert', 'random', 'student', 'ft:student:job_one'): assert stand_in(o, lab) == (o, None)
    assert stand_in('anything/at-all', Lab(lab.path, 'http://127.0.0.1:1/v1')) == ('anything/at-all', None)

def test_where_nothing_can_stand_in_the_way_out_is_said(lab, tmp_path):
    with pytest.raises(ConfigError, match='`rl:x:y` is not in the box, and .*train one'): stand_in('rl:x:y', lab)
    with pytest.raises(ConfigError, match='train one'): stand_in('ft:x:y', Lab(tmp_path/'new', 'local'))
    assert stand_in('Qwen/Qwen3-4B', Lab(tmp_path/'new', 'local'), 'rl')[0] == 'student'

def test_a_filter_means_the_models_that_stood_in(toml, lab):
    f = FilterConfig.load(toml(f'[filter]\n{FILTER}models = ["qwen/qwen3-32b", "openai/gpt-oss-120b"]'))
    selection,notes = f.select(lab)
    assert set(selection.episodes.model) == {'expert'} and len(selection.episodes) == 3 and len(notes) == 2
    with pytest.raises(FilterError, match='`ft:student:job_one`'): FilterConfig.load(toml(f'[filter]\n{FILTER}models = "peft:a:b"')).select(lab)

# Where traces are

def test_a_name_that_ends_in_db_is_a_folder(lab, tmp_path):
    for db in (f'{tmp_path}/traces/v3/blog.db', f'sqlite+aiosqlite:///{tmp_path}/traces/v3/blog.db', f'file:{tmp_path}/traces/v3/blog.db'):
        traces,notes = open_traces(db, lab)
        assert (traces.path, traces.models_path, notes) == (tmp_path/'traces/v3/blog.db', lab.models_path, [])

def test_a_server_is_not_needed(lab, tmp_path, monkeypatch):
    traces,notes = open_traces('sqlite+libsql://http://127.0.0.1:8080', lab)
    assert traces is lab and 'no server is needed' in notes[0]
    monkeypatch.setenv('CRAFTER_TRACE_DB', str(tmp_path/'blog.db'))
    assert open_traces('libsql://a.turso.io', lab)[0].path == tmp_path/'blog.db'

def test_none_keeps_nothing(lab):
    traces,_ = open_traces('none', lab)
    folder = traces.path
    assert folder.is_dir() and folder != lab.path
    del traces
    assert not folder.exists()

def test_what_is_no_database_is_refused(lab, tmp_path):
    (tmp_path/'a.db').write_text('hello')
    with pytest.raises(ConfigError, match='no v3 database'): open_traces(str(tmp_path/'a.db'), lab)
    sqlite3.connect(tmp_path/'b.db').execute('CREATE TABLE t (a)').connection.close()
    with pytest.raises(c.LabError): open_traces(str(tmp_path/'b.db'), lab)

# What a learning API elsewhere is sent

LLM = """[algorithm]
type = "offline"
method = "sft"
variety = "fft"
[job]
model = "Qwen/Qwen3-4B"
[compute]
gpu_type = "H100"
gpu_count = 4
nodes = 1
[data.topology]
container_count = 4
[training]
mode = "full_finetune"
use_qlora = false
[training.lora]
r = 8
[hyperparameters]
n_epochs = 2
learning_rate = 8e-6
weight_decay = 0.1
[hyperparameters.parallelism]
use_deepspeed = true
[tags]
who = "me"
"""

def elsewhere(asked, any_ok=True):
    "A learning API that writes down what it is asked"
    app = FastAPI()
    @app.post('/api/learning/files')
    async def files(file:UploadFile=File(), purpose:str=Form()):
        asked.append((purpose, (await file.read()).decode()))
        return dict(id=f'file-{len(asked)}')
    @app.post('/api/{path:path}')
    async def post(path:str, request:Request):
        asked.append((path, await request.body() and await request.json()))
        return dict(any_ok=any_ok) if 'verify' in path else dict(job_id='job_1', status='running' if path.endswith('start') else 'queued')
    return SimpleNamespace(endpoint=endpoint('synth'), learning=LearningClient(app=app))

def test_sft_elsewhere_is_sent_all_of_it(toml, tmp_path):
    for name in ('train', 'val'): (tmp_path/f'{name}.jsonl').write_text(name)
    text = LLM.replace('[data.topology]', f'[data]\nvalidation_path = "{tmp_path}/val.jsonl"\n[data.topology]')
    asked = []
    job,_ = launch(SFTConfig.load(toml(text), dataset=str(tmp_path/'train.jsonl')), elsewhere(asked))
    assert [o[0] for o in asked] == ['fine-tune', 'validation', 'learning/jobs', 'learning/jobs/job_1/start'] and (job.id, job.status) == ('job_1', 'running')
    effective = dict(compute=dict(gpu_type='H100', gpu_count=4, nodes=1), data=dict(topology=dict(container_count=4), validation_files=['file-2']),
        training=dict(mode='full_finetune', use_qlora=False, lora=dict(r=8)))
    assert asked[2][1] == dict(model='Qwen/Qwen3-4B', training_file_id='file-1', training_type='sft_offline', tags=dict(who='me'),
        metadata=dict(effective_config=effective),
        hyperparameters=dict(n_epochs=2, learning_rate=8e-6, weight_decay=.1, parallelism=dict(use_deepspeed=True)))

WIRE = """type = "rl"
[smoke]
max_steps = 3
[algorithm]
type = "online"
method = "policy_gradient"
variety = "gspo"
[services]
task_url = "https://mine--crafter.modal.run/"
[compute]
gpu_type = "H100"
gpu_count = 2
[compute.topology]
type = "single_node_split"
[policy]
model_name = "Qwen/Qwen3-4B"
trainer_mode = "lora"
label = "a"
[rollout]
env_name = "crafter"
policy_name = "crafter-react"
max_turns = 10
episodes_per_batch = 16
max_concurrent_rollouts = 4
[training]
num_epochs = 1
iterations_per_epoch = 10
max_turns = 10
batch_size = 4
group_size = 4
learning_rate = 5e-5
[training.lora]
r = 8
[evaluation]
instances = 2
every_n_iters = 1
seeds = [0, 1]
[tags]
who = "me"
"""

def test_rl_elsewhere_is_sent_all_of_it_after_the_task_app_was_looked_at(toml):
    asked = []
    job,_ = launch(RLConfig.load(toml(WIRE)), elsewhere(asked))
    (verify,url),(path,body) = asked
    assert (verify, url, path, job.id) == ('rl/verify_task_app', dict(endpoint_base_url='https://mine--crafter.modal.run'), 'rl/jobs', 'job_1')
    assert (body['job_type'], body['tags'], body['compute']['gpu_type'], [*body['metadata']]) == ('rl', dict(who='me'), 'H100', ['backend_base_url'])
    data = body['data']
    assert (data['endpoint_base_url'], data['base_model'], 'model' in data) == ('https://mine--crafter.modal.run', 'Qwen/Qwen3-4B', False)
    sent = data['config']
    assert ('smoke' in sent, sent['training']['lora'], sent['reference'], sent['algorithm']['variety']) == (False, dict(r=8), dict(placement='none'), 'gspo')

def test_a_fine_tuned_model_is_sent_as_a_model(toml): assert RLConfig.load(toml(WIRE),
    model='ft:Qwen/Qwen3-4B:job_1').payload()['data']['model'] == 'ft:Qwen/Qwen3-4B:job_1'

def test_a_task_app_that_cannot_be_reached_ends_it(toml):
    with pytest.raises(ConfigError, match='cannot use the task app'): launch(RLConfig.load(toml(WIRE)), elsewhere([], any_ok=False))

@pytest.mark.parametrize('old,new,why', [('https://mine--crafter.modal.run/', 'https://synth-laboratories--crafter.modal.run', 'put the URL there'),
    ('[services]\ntask_url = "https://mine--crafter.modal.run/"\n', '', 'task_url is missing'),
    ('learning_rate = 5e-5\n', '', 'wants training.learning_rate'), ('[compute.topology]\ntype = "single_node_split"\n', '', 'wants compute.topology'),
    ('"gspo"', '"ppo"', 'knows gspo'), ('Qwen/Qwen3-4B', 'REPLACE-WITH-ID', 'status models')])
def test_what_a_learning_api_would_refuse_is_refused_before(toml, old, new, why):
    with pytest.raises(ConfigError, match=why): RLConfig.load(toml(WIRE.replace(old, new))).payload()

# Training in the box

def test_numbers_for_another_size_are_noted_and_those_of_the_student_honoured(toml, lab):
    kw,notes = SFTConfig.load(toml(LLM)).asked(lab)
    assert (kw['model'], kw['n_epochs'], 'learning_rate' in kw) == ('student', 2,
        False) and [o for o in notes if '`hyperparameters.learning_rate`' in o and 'Qwen/Qwen3-4B' in o]
    assert SFTConfig.load(toml(LLM), model='student').asked(lab)[0]['learning_rate'] == 8e-6

def test_a_judge_is_no_part_of_a_job_of_the_box(toml, lab):
    for text in ('[judge]\nenabled = true\n[judge.reward_blend]\nevent = 0.5', '[rubric]\nenabled = true\n[rubric.weights]\noutcome = 1',
        '[rollout]\nrubric_rewards_only = true'):
        with pytest.raises(ConfigError, match='lab.served'): RLConfig.load(toml(RL + text)).asked(lab)
    with pytest.raises(ConfigError, match='difficulty normal'): RLConfig.load(toml(RL + '[rollout.env_config]\ndifficulty = "easy"')).asked(lab)

def test_a_job_of_the_box_holds_back_the_file_that_it_is_given(lab, tmp_path):
    data,val = (lab.filter(seeds=s).write(tmp_path/f'{n}.jsonl').path for n,s in (('data', (0, 1)), ('val', (2,))))
    (tmp_path/'both').mkdir()
    path,held = c._joined(data, val, tmp_path/'both')
    made = sft(path, tmp_path/'models', epochs=1, hidden=8, val_split=held).metrics
    assert (made['examples'], made['held_back']) == tuple(len(read_examples(o).y) for o in (data, val))

def test_a_dataset_that_is_not_there_is_said(toml):
    with pytest.raises(ConfigError, match='no file nowhere.jsonl'): SFTConfig.load(toml(SFT), dataset='nowhere.jsonl').dataset
    with pytest.raises(ConfigError, match='there is no dataset'): SFTConfig.load(None, model='student').dataset

# Files that are there

def test_our_examples_load_without_a_note_that_matters(lab):
    kinds = {f.name:kind_of(f) for f in sorted(EXAMPLES.glob('*.toml'))}
    assert kinds == {'eval_expert.toml':'eval', 'eval_finetuned.toml':'eval', 'filter_good.toml':'filter', 'smoke.toml':'smoke', 'train_rl.toml':'rl',
        'train_sft.toml':'sft'}
    for name,kind in kinds.items():
        made = dict(eval=EvalConfig, filter=FilterConfig, smoke=SmokeConfig, sft=SFTConfig, rl=RLConfig)[kind].load(EXAMPLES/name)
        if kind != 'rl': assert made.notes == [], name
        if kind in ('sft', 'rl'): made.asked(lab)

@pytest.mark.skipif(not os.environ.get('SYNTH_AI'), reason='set SYNTH_AI to the `synth-ai` of a virtual environment with synth-ai 0.2.19')
def test_the_published_files_load_unchanged(lab, tmp_path):
    folder = next(Path(os.environ['SYNTH_AI']).parents[1].glob('lib/*/site-packages/examples/blog_posts/warming_up_to_rl/configs'))
    kinds = {f.name:kind_of(f) for f in folder.glob('*.toml')}
    assert sorted(kinds.values()) == ['eval']*5 + ['filter', 'rl', 'rl', 'sft']
    for name,kind in kinds.items():
        made = dict(eval=EvalConfig, filter=FilterConfig, sft=SFTConfig, rl=RLConfig)[kind].load(folder/name)
        if kind == 'eval': assert made.turns == 10 and made.url is None and stand_in(made.model,
            lab)[0].startswith('ft:' if made.model[:4] in ('fft:', 'peft') else 'expert')
        elif kind == 'filter': assert {*made.select(lab)[0].episodes.model} == {'expert'} and made.rules['min_achievements'] == 1
        else: assert made.asked(lab)[0]['model'].startswith('student' if kind == 'sft' else 'ft:student:job_')
        if '[smoke]' in (folder/name).read_text(): assert SmokeConfig.load(folder/name).max_steps == 10
