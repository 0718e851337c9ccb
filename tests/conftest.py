"Tests ask no endpoint and touch no lab of the person who runs them"
import os, signal

# on import, so that modules read later and programs started by a test see none of it either
for name in list(os.environ):
    if name.endswith(('_BASE_URL', '_API_KEY')) or name == 'SYNTH_LAB_PATH': del os.environ[name]

signal.signal(signal.SIGINT, signal.default_int_handler)  # programs started behind a shell's & are deaf to Ctrl-C, and so would be those that a test starts
