"Requests, model ids, token counts and prices of each server, by value"
import copy, math

import pytest
from hypothesis import given, settings as hypothesis, strategies as st

from synth_lab.core import LabError, Price, SettingsError, settings
from synth_lab.dialects import COUNTS, DIALECTS, Dialect, DialectError, ModelId, dialect_of, dollars, model_id, read_usage
from synth_lab.tools import interact_many

# ---- requests

TOOL = interact_many(4)
OTHER = dict(type='function', function=dict(name='look', parameters=dict(type='object', properties={})))
CALL = dict(id='call_0', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))
PAST = dict(role='assistant', content='', reasoning_content='A tree.', tool_calls=[CALL])
TALK = [dict(role='system', content='Play.'), dict(role='user', content=[dict(type='text', text='You see a tree.')]), PAST,
    dict(role='tool', tool_call_id='call_0', content='Done: do.'), dict(role='user', content='1 wood')]
ASK = dict(messages=TALK, tools=[TOOL, OTHER], tool_choice='required', parallel_tool_calls=False, max_tokens=256, temperature=1., top_p=.9, seed=7)
STRICT = [TOOL | dict(function=TOOL['function'] | dict(strict=True)), OTHER]

def talk(**past): return TALK[:2] + [{k:v for k,v in PAST.items() if k != 'reasoning_content'} | past] + TALK[3:]
def without(body, *names): return {k:v for k,v in body.items() if k not in names}
def request(dialect, model='m', **more): return DIALECTS[dialect].request(dict(model=model) | more)
def refused(match, dialect, model='m', **more):
    with pytest.raises(DialectError, match=match) as e: request(dialect, model, **more)
    assert e.value.fix

LIMITED = dict(max_completion_tokens=256)
BODIES = [
    ('local', 'student', dict(thinking=False), ASK),
    ('local', 'expert', dict(thinking=True), ASK),
    ('openai', 'somebody/elses', {}, ASK),
    ('openai', 'openai/gpt-oss-20b', {}, ASK),
    ('openai', 'gpt-4o-mini', dict(thinking=False), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(), tools=STRICT)),
    ('openai', 'ft:gpt-4o-mini-2024-07-18:org::abc', {}, without(ASK, 'max_tokens') | LIMITED | dict(messages=talk())),
    ('openai', 'gpt-5.1', dict(thinking=True), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(), tools=STRICT, reasoning_effort='medium')),
    ('openai', 'gpt-5.4-mini', dict(thinking=False), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(), tools=STRICT)),
    ('openai', 'gpt-5.6-luna', {}, without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(), tools=STRICT, reasoning_effort='none')),
    ('openai', 'gpt-6-sol', dict(thinking=False), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(), tools=STRICT, reasoning_effort='none')),
    ('openai', 'gpt-5-mini', dict(thinking=True, top_p=1), without(ASK, 'max_tokens', 'temperature', 'top_p') | LIMITED | dict(messages=talk(), tools=STRICT, reasoning_effort='medium')),
    ('openai', 'o4-mini', dict(thinking=True, top_p=1), without(ASK, 'max_tokens', 'temperature', 'top_p', 'parallel_tool_calls') | LIMITED | dict(messages=talk())),
    ('groq', 'llama-3.3-70b-versatile', dict(thinking=False, n=1, logprobs=False), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk())),
    ('groq', 'qwen/qwen3-32b', dict(thinking=False), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(reasoning='A tree.'), reasoning_effort='none')),
    ('groq', 'openai/gpt-oss-20b', dict(thinking=True), without(ASK, 'max_tokens') | LIMITED | dict(messages=talk(reasoning='A tree.'), reasoning_effort='medium')),
    ('synth', 'Qwen/Qwen3-4B', dict(thinking=True), ASK | dict(stop_after_tool_calls=1, thinking_mode='think', thinking_budget=1028)),
    ('synth', 'Qwen/Qwen3-4B', dict(thinking=False), ASK | dict(stop_after_tool_calls=1, thinking_mode='no_think')),
    ('vllm', 'Qwen/Qwen3-4B', dict(thinking=False), ASK | dict(messages=talk(reasoning='A tree.'), chat_template_kwargs=dict(enable_thinking=False))),
    ('vllm', 'ibm-granite/Granite-3.2-8b', dict(thinking=True), ASK | dict(messages=talk(reasoning='A tree.'), chat_template_kwargs=dict(thinking=True))),
    ('ollama', 'qwen3:4b', dict(thinking=False, tool_choice='auto', parallel_tool_calls=True),
        without(ASK, 'tool_choice', 'parallel_tool_calls') | dict(messages=talk(reasoning='A tree.'), reasoning_effort='none')),
    ('llamacpp', 'qwen3', dict(thinking=True), ASK | dict(chat_template_kwargs=dict(enable_thinking=True))),
    ('lmstudio', 'qwen3', {}, ASK)]

@pytest.mark.parametrize('dialect, model, more, body', BODIES, ids=[f'{d} {m} {more.get("thinking", "")}' for d,m,more,_ in BODIES])
def test_body(dialect, model, more, body):
    payload = dict(model=model) | ASK | more
    before = copy.deepcopy(payload)
    assert DIALECTS[dialect].request(payload) == dict(model=model) | body
    assert payload == before

def test_each_dialect_has_a_body_here(): assert {o[0] for o in BODIES} == set(DIALECTS)

def test_nothing_to_change_is_not_copied():
    payload = dict(model='m', messages=talk(), tools=[TOOL], max_tokens=9, temperature=.2, seed=7)
    for name in ('local', 'openai', 'synth', 'vllm', 'llamacpp', 'lmstudio'): assert DIALECTS[name].request(payload) is payload, name

def test_messages_that_stay_are_the_same_objects():
    sent = request('vllm', messages=TALK)['messages']
    assert [a is b for a,b in zip(sent, TALK)] == [True, True, False, True, True]

@pytest.mark.parametrize('content, dialect, sent', [(None, 'lmstudio', ''), (None, 'llamacpp', None), ('', 'lmstudio', ''), ('go', 'lmstudio', 'go')])
def test_content_of_a_message_that_only_calls(content, dialect, sent):
    assert request(dialect, messages=[dict(role='assistant', content=content, tool_calls=[CALL])])['messages'][0]['content'] == sent

def test_a_message_without_content_stays_without(): # an audio reply, or an older client's tool call
    assert request('lmstudio', messages=[dict(role='assistant', tool_calls=[CALL])])['messages'] == [dict(role='assistant', tool_calls=[CALL])]

@pytest.mark.parametrize('dialect, model, sent', [('ollama', 'm', 'max_tokens'), ('openai', 'm', 'max_tokens'), ('vllm', 'm', 'max_tokens'),
    ('groq', 'm', 'max_completion_tokens'), ('openai', 'gpt-4.1', 'max_completion_tokens'), ('openai', 'chatgpt-4o-latest', 'max_completion_tokens')])
@pytest.mark.parametrize('asked', ['max_tokens', 'max_completion_tokens'])
def test_the_limit_of_a_reply_is_never_lost(dialect, model, sent, asked):
    assert request(dialect, model, **{asked:64}) == {'model':model, sent:64}

def test_a_limit_given_twice_keeps_the_one_that_the_server_knows():
    assert request('groq', max_tokens=1, max_completion_tokens=2) == dict(model='m', max_completion_tokens=2)

# ---- tool_choice

NAMED = dict(type='function', function=dict(name='look'))

@pytest.mark.parametrize('dialect', ['llamacpp', 'lmstudio'])
def test_a_named_function_is_the_only_one_offered(dialect):
    assert request(dialect, tools=[TOOL, OTHER], tool_choice=NAMED) == dict(model='m', tools=[OTHER], tool_choice='required')

@pytest.mark.parametrize('dialect', ['openai', 'groq', 'vllm', 'synth', 'local'])
@pytest.mark.parametrize('choice', ['auto', 'none', 'required', NAMED])
def test_elsewhere_tool_choice_stays(dialect, choice): assert request(dialect, tools=[OTHER], tool_choice=choice) == dict(model='m', tools=[OTHER], tool_choice=choice)

def test_ollama_has_no_tool_choice():
    assert request('ollama', tools=[OTHER], tool_choice='auto') == dict(model='m', tools=[OTHER])
    assert request('ollama', tools=[OTHER], tool_choice='none', parallel_tool_calls=True) == dict(model='m')
    refused('tool_choice=.required', 'ollama', tools=[OTHER], tool_choice='required')
    refused('tool_choice=', 'ollama', tools=[OTHER], tool_choice=NAMED)

def test_a_function_that_is_not_offered():
    refused('tool_choice=', 'lmstudio', tools=[TOOL], tool_choice=NAMED)
    refused('tool_choice=', 'lmstudio', tool_choice=dict(type='function'))

def test_forms_that_nobody_here_knows_are_left_to_the_server():
    allowed = dict(type='allowed_tools', allowed_tools={})
    assert request('lmstudio', tool_choice=allowed)['tool_choice'] == allowed

# ---- strict schemas

def schema(**properties): return dict(type='object', properties=properties, required=list(properties), additionalProperties=False)

@pytest.mark.parametrize('parameters, strict', [(schema(), True), (schema(a=dict(type='string')), True), (schema(a=schema(b=dict(type='integer'))), True),
    (schema(a=dict(type='array', items=schema())), True), (schema(a=dict(type='string')) | dict(required=[]), False),
    (without(schema(), 'additionalProperties'), False), (schema(a=schema() | dict(additionalProperties=True)), False), (schema(a=dict(type='array')), False),
    (schema(a={}), False), (schema(a=dict(type=['object', 'null'])), False), (None, False), ('', False)])
def test_only_a_schema_that_says_all_is_strict(parameters, strict):
    tool = dict(type='function', function=dict(name='f', parameters=parameters))
    assert request('openai', 'gpt-4o', tools=[tool])['tools'][0]['function'].get('strict', False) is strict

def test_strict_that_was_said_stays():
    tool = dict(type='function', function=dict(name='f', parameters=schema(), strict=False))
    assert request('openai', 'gpt-4o', tools=[tool])['tools'] == [tool]

def test_the_agents_tool_is_ready_for_strict_mode(): assert request('openai', 'gpt-4o', tools=[TOOL])['tools'] == STRICT[:1]

# ---- what cannot be had

@pytest.mark.parametrize('dialect, model, asked', [('openai', 'm', True), ('openai', 'm', False), ('openai', 'gpt-4o', True), ('openai', 'gpt-5-nano', False), ('openai', 'o3', False),
    ('groq', 'llama-3.1-8b-instant', True), ('groq', 'openai/gpt-oss-120b', False), ('ollama', 'gpt-oss:20b', False), ('lmstudio', 'm', True), ('vllm', 'm', 'yes'), ('vllm', 'm', 1), ('vllm', 'm', [])])
def test_thinking_that_cannot_be_switched(dialect, model, asked): refused('thinking=', dialect, model, thinking=asked)

@pytest.mark.parametrize('model', ['gpt-5.2', 'gpt-5.4', 'gpt-5.5', 'gpt-5.6-sol', 'gpt-6-luna'])
def test_no_thinking_with_tools_over_chat_completions(model):
    refused('and tools', 'openai', model, thinking=True, tools=[TOOL])
    assert request('openai', model, thinking=True) == dict(model=model, reasoning_effort='medium')

def test_a_model_without_tools():
    refused('takes no tools', 'openai', 'gpt-6-astra', tools=[TOOL])
    assert request('openai', 'gpt-6-astra', tools=[], temperature=1) == dict(model='gpt-6-astra', tools=[])

@pytest.mark.parametrize('dialect, model, name, value', [('openai', 'o3-mini', 'temperature', .7), ('openai', 'gpt-5', 'top_p', .9), ('openai', 'gpt-5', 'logprobs', True),
    ('openai', 'o1', 'parallel_tool_calls', True), ('groq', 'm', 'logprobs', True), ('groq', 'm', 'n', 2), ('groq', 'm', 'logit_bias', {'1':1}), ('ollama', 'm', 'parallel_tool_calls', False), ('ollama', 'm', 'n', 4)])
def test_a_refused_parameter_that_asks_for_something(dialect, model, name, value): refused(f'leave out {name}', dialect, model, **{name:value})

@pytest.mark.parametrize('model', ['gpt-4o', 'gpt-4.1-mini', 'gpt-5.1', 'gpt-5.4', 'gpt-5-chat-latest', 'm'])
def test_others_take_a_temperature(model): assert request('openai', model, temperature=.2) == dict(model=model, temperature=.2)

# ---- the request's own fields

@pytest.mark.parametrize('dialect, model, own, sent', [
    ('vllm', 'm', dict(chat_template_kwargs=dict(preserve=1)), dict(chat_template_kwargs=dict(preserve=1, enable_thinking=True))),
    ('vllm', 'm', dict(chat_template_kwargs=dict(enable_thinking=False)), dict(chat_template_kwargs=dict(enable_thinking=False))),
    ('synth', 'm', dict(thinking_budget=64), dict(thinking_mode='think', thinking_budget=64)),
    ('ollama', 'm', dict(reasoning_effort='high'), dict(reasoning_effort='high')),
    ('openai', 'gpt-5.1', dict(reasoning_effort='low'), dict(reasoning_effort='low'))])
def test_a_field_of_the_request_wins_over_the_switch(dialect, model, own, sent): assert request(dialect, model, thinking=True, **own) == dict(model=model) | sent

def test_own_stop_after_tool_calls(): assert request('synth', parallel_tool_calls=False, stop_after_tool_calls=3)['stop_after_tool_calls'] == 3

def test_requests_without_a_model_or_messages(): assert [DIALECTS[o].request({}) for o in DIALECTS] == [{}]*len(DIALECTS)

def test_a_dialect_of_ones_own():
    mine = Dialect('mine', limit='max_output_tokens', models=(('big', dict(limit='max_tokens')),))
    assert mine.request(dict(model='small', max_tokens=1)) == dict(model='small', max_output_tokens=1)
    assert mine.request(dict(model='BIG', max_tokens=1)) == dict(model='BIG', max_tokens=1)

# ---- which dialect

@pytest.mark.parametrize('args, name', [(('groq',), 'groq'), (('local',), 'local'), (('api.example.com',), 'openai'), (('mine', 'llamacpp'), 'llamacpp'), (('groq', 'openai'), 'openai')])
def test_dialect_of(args, name): assert dialect_of(*args) is DIALECTS[name]

def test_a_dialect_that_is_none_names_the_nearest():
    with pytest.raises(DialectError, match=r'\[endpoint.mine\] dialect = vlm.*did you mean `vllm`'): dialect_of('mine', 'vlm')
    with pytest.raises(DialectError, match='`lmstudio`'): dialect_of('mine', 'zzz')

# ---- model ids

@pytest.mark.parametrize('text, base, kind, job, checkpoint', [
    ('Qwen/Qwen3-4B', 'Qwen/Qwen3-4B', 'base', None, None),
    ('expert', 'expert', 'base', None, None),
    ('gpt-4o-mini-2024-07-18', 'gpt-4o-mini-2024-07-18', 'base', None, None),
    ('qwen3:4b', 'qwen3:4b', 'base', None, None),
    ('hf.co/Qwen/Qwen3-4B-GGUF:Q4_K_M', 'hf.co/Qwen/Qwen3-4B-GGUF:Q4_K_M', 'base', None, None),
    ('localhost:5000/me/qwen:4b', 'localhost:5000/me/qwen:4b', 'base', None, None),
    ('ft-model', 'ft-model', 'base', None, None),
    ('ft:student:job_1a2b3c4d', 'student', 'ft', 'job_1a2b3c4d', None),
    ('rl:student:job_6448371a', 'student', 'rl', 'job_6448371a', None),
    ('peft:Qwen/Qwen3-0.6B:job_24faa0fdfdf648b9', 'Qwen/Qwen3-0.6B', 'peft', 'job_24faa0fdfdf648b9', None),
    ('fft:Qwen/Qwen3-4B:job_x', 'Qwen/Qwen3-4B', 'fft', 'job_x', None),
    ('qft:Qwen/Qwen3-4B:job_x', 'Qwen/Qwen3-4B', 'qft', 'job_x', None),
    ('ft:Qwen/Qwen3-4B:ftjob-0123456789abcdef', 'Qwen/Qwen3-4B', 'ft', 'ftjob-0123456789abcdef', None),
    ('ft:qwen3:4b:job_x', 'qwen3:4b', 'ft', 'job_x', None),
    ('rl:Qwen/Qwen3-4B:job_x:checkpoint-epoch-1', 'Qwen/Qwen3-4B', 'rl', 'job_x', 'checkpoint-epoch-1'),
    ('ft:gpt-4o-mini-2024-07-18:org::abc', 'gpt-4o-mini-2024-07-18', 'ft', 'abc', None),
    ('ft:gpt-3.5-turbo-0125:my-org:custom:96olL566', 'gpt-3.5-turbo-0125', 'ft', '96olL566', None),
    ('ft:gpt-4o-mini-2024-07-18:my-org:custom:96olL566:ckpt-step-2000', 'gpt-4o-mini-2024-07-18', 'ft', '96olL566', 'ckpt-step-2000')])
def test_model_id(text, base, kind, job, checkpoint): assert model_id(text) == ModelId(text, base, kind, job, checkpoint)

@pytest.mark.parametrize('text', ['', ' ', 'Qwen/Qwen3 4B', 'ft:', 'ft:student', 'ft::job_x', 'rl:student:', 'ft:student:job_', 'peft:Qwen/Qwen3-4B', 'rl:org::abc', ':job_x', 'a:', 'a:b:c', 'banana:Qwen/Qwen3-4B:job_x',
    'ft:student:job_x:a:b:c', 'student\n', None, 7])
def test_what_is_no_model_id(text):
    with pytest.raises(LabError, match='is not the id of a model'): model_id(text)

# ---- token counts and cents

PRICE = Price(2., .5, 8., 2.5) # of which each usage below costs a whole number of hundredths of a cent
P,C = 'prompt_tokens_details','completion_tokens_details'
USAGES = dict( # name: usage, counts, dollars
    plain=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1100), (1000, 100, 0, 0, None), .0028),
    openai=(dict(prompt_tokens=1000, completion_tokens=300, total_tokens=1300, **{P:dict(cached_tokens=800, audio_tokens=0), C:dict(reasoning_tokens=200, audio_tokens=0)}), (1000, 300, 800, 0, 200), .0032),
    openai_writes=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1100, **{P:dict(cached_tokens=0, cache_write_tokens=800)}), (1000, 100, 0, 800, None), .0032),
    responses=(dict(input_tokens=1000, output_tokens=300, total_tokens=1300, input_tokens_details=dict(cached_tokens=800), output_tokens_details=dict(reasoning_tokens=200)), (1000, 300, 800, 0, 200), .0032),
    vllm=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1100, **{P:None}), (1000, 100, 0, 0, None), .0028),
    groq=(dict(queue_time=.1, prompt_tokens=1000, completion_tokens=300, total_tokens=1300, total_time=.2, **{P:dict(cached_tokens=400), C:dict(reasoning_tokens=100)}), (1000, 300, 400, 0, 100), .0038),
    deepseek=(dict(prompt_tokens=1000, completion_tokens=300, total_tokens=1300, prompt_cache_hit_tokens=800, prompt_cache_miss_tokens=200, **{C:dict(reasoning_tokens=200)}), (1000, 300, 800, 0, 200), .0032),
    kimi=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1100, cached_tokens=800), (1000, 100, 800, 0, None), .0016),
    anthropic=(dict(input_tokens=100, cache_read_input_tokens=800, cache_creation_input_tokens=400, output_tokens=100), (1300, 100, 800, 400, None), .0024),
    anthropic_uncached=(dict(input_tokens=1000, cache_read_input_tokens=0, cache_creation_input_tokens=0, output_tokens=100), (1000, 100, 0, 0, None), .0028),
    beside=(dict(prompt_tokens=100, cache_read_input_tokens=800, cache_creation_input_tokens=400, completion_tokens=100, total_tokens=1400), (1300, 100, 800, 400, None), .0024),
    beside_without_total=(dict(prompt_tokens=100, completion_tokens=100, **{P:dict(cached_tokens=800)}), (900, 100, 800, 0, None), .0014),
    litellm=(dict(prompt_tokens=1300, completion_tokens=100, total_tokens=1400, cache_read_input_tokens=800, cache_creation_input_tokens=400, **{P:dict(cached_tokens=800, cache_creation_tokens=400)}), (1300, 100, 800, 400, None), .0024),
    xai=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1300, **{P:dict(cached_tokens=800), C:dict(reasoning_tokens=200)}), (1000, 300, 800, 0, 200), .0032),
    xai_without_total=(dict(prompt_tokens=1000, completion_tokens=100, **{C:dict(reasoning_tokens=200)}), (1000, 300, 0, 0, 200), .0044),
    gemini=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1300), (1000, 300, 0, 0, 200), .0044),
    only_thoughts=(dict(prompt_tokens=1000, completion_tokens=0, total_tokens=1200, **{C:dict(reasoning_tokens=200)}), (1000, 200, 0, 0, 200), .0036),
    nothing=(dict(prompt_tokens=0, completion_tokens=0, total_tokens=0), (0, 0, 0, 0, None), 0.),
    absent=(None, (None,)*5, None), empty=({}, (None,)*5, None), half=(dict(prompt_tokens=5), (5, None, None, None, None), None),
    text=(dict(prompt_tokens='1000', completion_tokens=100), (None, 100, None, None, None), None),
    truth=(dict(prompt_tokens=True, completion_tokens=100), (None, 100, None, None, None), None),
    negative=(dict(prompt_tokens=-1, completion_tokens=100), (None, 100, None, None, None), None),
    fraction=(dict(prompt_tokens=10.5, completion_tokens=100), (None, 100, None, None, None), None),
    unreadable_cache=(dict(prompt_tokens=1000, completion_tokens=100, **{P:dict(cached_tokens='many')}), (1000, 100, None, 0, None), None),
    more_kept_than_sent=(dict(prompt_tokens=1000, completion_tokens=100, total_tokens=1100, **{P:dict(cached_tokens=1200)}), (1000, 100, 1200, 0, None), None))

@pytest.mark.parametrize('usage, counts, cost', USAGES.values(), ids=USAGES)
def test_usage(usage, counts, cost):
    read = read_usage(usage)
    assert tuple(read.values()) == counts and list(read) == list(COUNTS)
    assert read_usage(read) == read
    got = dollars(PRICE, usage)
    assert dollars(PRICE, read) == got
    assert got == (cost if cost is None else pytest.approx(cost, abs=1e-12))

def test_writing_to_a_cache_costs_as_input_unless_said():
    usage = USAGES['anthropic'][0]
    assert dollars(PRICE, usage) - dollars(PRICE._replace(cache_write=None), usage) == pytest.approx(400*(2.5 - 2.)/1e6)
    assert dollars(Price(2., .5, 8., 0.), usage) == pytest.approx(.0014)

def test_unknown_price_and_no_price():
    assert dollars(None, USAGES['plain'][0]) is None
    assert dollars(Price(0, 0, 0), None) == 0. and dollars(Price(0, 0, 0, 0), {}) == 0.

JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4), lambda o: st.lists(o, max_size=3) | st.dictionaries(st.sampled_from(
    [P, C, 'prompt_tokens', 'completion_tokens', 'input_tokens', 'output_tokens', 'total_tokens', 'cached_tokens', 'reasoning_tokens', 'cache_read_input_tokens', 'cache_write_tokens']), o, max_size=6), max_leaves=12)

@hypothesis(max_examples=300, deadline=None)
@given(JSON)
def test_no_usage_raises_and_no_cost_is_odd(usage):
    read = read_usage(usage)
    assert all(o is None or type(o) is int and o >= 0 for o in read.values())
    cost = dollars(PRICE, usage)
    assert cost is None or cost >= 0 and math.isfinite(cost)
    assert read_usage(read) == read

# ---- settings

def written(tmp_path, monkeypatch, text):
    (tmp_path/'settings.ini').write_text(text)
    monkeypatch.chdir(tmp_path)
    return settings()

def test_the_laptops_servers_have_endpoints_that_cost_nothing():
    s = settings()
    assert [s.endpoints[o].base_url for o in ('ollama', 'llamacpp', 'lmstudio')] == [f'http://127.0.0.1:{o}/v1' for o in (11434, 8080, 1234)]
    assert all(s.endpoints[o].start and s.price(o, 'any') == Price(0, 0, 0) for o in ('local', 'vllm', 'ollama', 'llamacpp', 'lmstudio'))
    assert set(s.endpoints) == set(DIALECTS) and s.limits.concurrency == 256

def test_prices_of_others():
    s = settings()
    assert s.price('openai', 'gpt-6-luna') == Price(.1, .01, .5, .125) and s.price('groq', 'openai/gpt-oss-20b') == Price(.075, .0375, .3)
    assert s.price('openai', 'some-new-model') is None and s.price('synth', 'Qwen/Qwen3-4B') is None
    for table in s.prices.values(): assert all(o.cached <= o.input <= o.output for o in table.values())

def test_settings_of_ones_own(tmp_path, monkeypatch):
    s = written(tmp_path, monkeypatch, '[limits]\nconcurrency = 8\n[endpoint.mine]\nbase_url = http://127.0.0.1:9/v1\ndialect = vllm\n[prices.mine]\nm = 1, .5, 2, 1.25\n* = 1, .5, 2\n')
    assert (s.limits.concurrency, s.endpoints['mine'].dialect, s.endpoints['groq'].dialect) == (8, 'vllm', None)
    assert s.price('mine', 'm') == (1., .5, 2., 1.25) and s.price('mine', 'other') == (1., .5, 2., None)

@pytest.mark.parametrize('line, match', [('m = 1, 2', 'price of groq/m'), ('m = 1, 2, 3, 4, 5', 'price of groq/m'), ('m = 1, 2, -3', 'price of groq/m'), ('m = 1, 2, 3, -4', 'price of groq/m'),
    ('m = 1, 2, nan', 'price of groq/m'), ('m = 1, 2, inf', 'price of groq/m'), ('m = one, 2, 3', 'price of groq/m'), ('m =', 'price of groq/m')])
def test_prices_that_are_none(line, match, tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=match): written(tmp_path, monkeypatch, f'[prices.groq]\n{line}\n')

@pytest.mark.parametrize('text, match', [('[limits]\nconcurrency = 0\n', 'concurrency'), ('[limits]\nconcurrency = many\n', 'concurrency'), ('[limits]\nconcurency = 8\n', 'did you mean `concurrency`'),
    ('[endpoint.mine]\nbase_url = http://127.0.0.1:9/v1\ndialct = vllm\n', 'did you mean `dialect`')])
def test_settings_that_are_none(text, match, tmp_path, monkeypatch):
    with pytest.raises(SettingsError, match=match): written(tmp_path, monkeypatch, text)
