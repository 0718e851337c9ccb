"""TRL's own data path takes our rows, and learns from what we say it learns from. Needs trl, which the lab does not install"""
import json, os

import pytest

pytestmark = pytest.mark.slow
pytest.importorskip('trl')
os.environ.setdefault('HF_HUB_OFFLINE', '1')

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import SFTConfig, SFTTrainer

from synth_lab.filters import Filter
from synth_lab.preflight import CHATML, _jinja, _look, preflight_sft
from synth_lab.rows import from_trl, to_trl
from synth_lab.tools import interact_many
from synth_lab.traces import Store


@pytest.fixture
def rows(tmp_path):
    "Three windows of two turns each, written for TRL"
    store = Store(tmp_path/'lab')
    planned = [dict(episode_id=f't:{s}:0', seed=s, sample=0) for s in range(3)]
    with store.run('t', dict(model='m', endpoint='local', split='train', difficulty='normal', rng='pure', length=10), planned) as w:
        for p in planned:
            who = dict(episode_id=p['episode_id'], attempt=1)
            w.write('episode', **who, started_at='2026-01-31T12:00:00.000Z')
            for n in (1, 2):
                call = dict(id=f'call_{n}', type='function', function=dict(name='interact_many', arguments=json.dumps(dict(actions=['do']*n))))
                w.call([dict(role='system', content='You play Crafter.'), dict(role='user', content=f'step {n} of world {p["seed"]}: "a tree" ')], [interact_many(8)],
                    dict(role='assistant', content='', tool_calls=[call]), **who, turn=n, call_id=f'{p["episode_id"]}:{n}', verdict='ok', thought=f'Wood, {n}.', actions=['do']*n)
            w.write('episode_end', **who, status='done', achievements=[], steps_played=2, **{'return': 1.})
    return Filter(granularity='window', window=2).select(store).write(tmp_path/'d.jsonl', dialect='trl').path


def loaded(path, tmp_path): return load_dataset('json', data_files=str(path), split='train', cache_dir=str(tmp_path/'cache'))


def tokenizer(template):
    "Bytes as tokens, so that decoding gives back what was rendered"
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator(['a'], trainers.BpeTrainer(vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=['<pad>', '<eos>']))
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', eos_token='<eos>', chat_template=template)


def trainer(data, template, tmp_path, **how):
    config = Qwen2Config(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    args = SFTConfig(output_dir=str(tmp_path/'out'), max_length=None, max_steps=1, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to='none', save_strategy='no', disable_tqdm=True, **how)
    return SFTTrainer(Qwen2ForCausalLM(config), args=args, train_dataset=data, processing_class=tokenizer(template))


def learned_by(t):
    "The text that each row is trained on"
    return [t.processing_class.decode([o for o in r['labels'] if o != -100]) for r in t.train_dataset]


def ours(path):
    "What the preflight says that they are trained on"
    return [_look(from_trl(json.loads(line)), _jinja(CHATML))[2] for line in path.read_bytes().splitlines()]


def test_the_trainer_takes_our_rows_and_steps(rows, tmp_path):
    t = trainer(loaded(rows, tmp_path), CHATML, tmp_path)
    whole = [t.processing_class.decode(r['input_ids']) for r in t.train_dataset]
    assert len(whole) == 3 and all('interact_many' in o.split('<|im_start|>system')[0] for o in whole)
    learned = learned_by(t)
    assert all(o.startswith('Wood, 1.<tool_call>{"name": "interact_many", "arguments": {"actions": ["do"]}}</tool_call>') and 'You play' not in o for o in learned)
    assert torch.isfinite(torch.tensor(t.train().training_loss))


def test_the_mask_of_answers_is_ours(rows, tmp_path):
    t = trainer(loaded(rows, tmp_path), CHATML, tmp_path, assistant_only_loss=True)
    assert learned_by(t) == ours(rows) and all('step' not in o for o in ours(rows))
    assert preflight_sft(rows, tokenizer(CHATML), 'trl').ok


def test_arguments_of_any_type_survive_arrow(tmp_path):
    "A string in one row, a number in the next, other names in the third"
    made = []
    for args in (dict(time='x'), dict(time=1), dict(other=[1], deep=dict(a=None))):
        calls = [dict(id='c', type='function', function=dict(name='f', arguments=json.dumps(args)))]
        made.append(to_trl(dict(messages=[dict(role='user', content='go'), dict(role='assistant', tool_calls=calls)],
            tools=[dict(type='function', function=dict(name=n, parameters=dict(type='object', properties={n: dict(type='string')}))) for n in 'fg'])))
    (tmp_path/'mixed.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in made))
    data = loaded(tmp_path/'mixed.jsonl', tmp_path)
    assert [dict(r) for r in data] == made
    learned = learned_by(trainer(data, CHATML, tmp_path))
    assert ['"time": "x"' in learned[0], '"time": 1' in learned[1], '"other": [1]' in learned[2], '"time"' in learned[2]] == [True, True, True, False]
