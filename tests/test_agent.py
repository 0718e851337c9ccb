"What the lesson of the agent should not carry: what is sent in every mode, and servers whose bookkeeping is odd, though their replies are usable"
import asyncio, json
from base64 import b64decode
from io import BytesIO
from types import SimpleNamespace

import numpy as np, orjson, pytest
from PIL import Image

from synth_lab.agent import PICTURE, SYSTEM, Agent, AgentError, TurnMemory, turn
from synth_lab.client import AsyncInferenceClient
from synth_lab.core import digest
from synth_lab.tools import interact_many, read_reply
from synth_lab.view import data_url, png
from synth_lab.world import World

CALL = dict(id='c', function=dict(name='interact_many', arguments=json.dumps(dict(actions=['move_left', 'do']))))
ENTRIES = [dict(token='move_left', logprob=-1.5), dict(token='do', logprob=-2)]

def once(choice={}, max_tokens=None, **body):
    "One turn with a server that adds `choice` to its choice and `body` to its body, and what the server sent"
    sent = body | dict(choices=[dict(finish_reason='tool_calls', message=dict(role='assistant', content='I go.', tool_calls=[CALL])) | choice])
    async def app(scope, receive, send):
        await send(dict(type='http.response.start', status=200, headers=[]))
        await send(dict(type='http.response.body', body=orjson.dumps(sent)))
    return asyncio.run(turn(Agent('m', max_tokens=max_tokens), AsyncInferenceClient(app=app), [], '(step 1)')),sent

def ask(*args, **kw):
    "A turn whose reply is usable"
    t,sent = once(*args, **kw)
    assert (t.reply.verdict, t.reply.actions, t.body) == ('ok', ('move_left', 'do'), sent)
    return t

@pytest.mark.parametrize('usage, counts', [('n/a', (None, None)), ([1], (None, None)), (None, (None, None)), (7, (None, None)),
    (dict(prompt_tokens='3', completion_tokens=2), (None, 2)), (dict(prompt_tokens=3, completion_tokens=True), (3, None)),
    (dict(prompt_tokens=-3, completion_tokens=2), (None, 2)),
    (dict(prompt_tokens=2**64-1, completion_tokens=2), (None, 2)), (dict(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=[1]), (3, 2)),
    (dict(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=dict(cached_tokens='all')), (3, 2))])
def test_odd_usage_is_unknown_and_the_turn_goes_on(usage, counts):
    t = ask(usage=usage)
    assert (t.usage['prompt_tokens'], t.usage['completion_tokens']) == counts

def test_the_models_in_the_box_cost_nothing(): assert ask(usage=dict(prompt_tokens=3, completion_tokens=2)).cost == 0.

def test_log_probabilities_of_the_actions(): assert ask(dict(logprobs=dict(content=ENTRIES))).logprobs == (-1.5, -2)

@pytest.mark.parametrize('logprobs', ['x', [1], None, {}, dict(content=None), dict(content=[1]), dict(content='move_left'), dict(content=[]),
    dict(content=ENTRIES[:1]), dict(content=[*ENTRIES, None]), dict(content=[ENTRIES[0], dict(token='do')]),
    dict(content=[ENTRIES[0], dict(token='do', logprob='-2')])])
def test_odd_log_probabilities_are_none(logprobs): assert ask(dict(logprobs=logprobs)).logprobs is None

HALF = dict(message=dict(content=None, tool_calls=[dict(id='c', function=dict(name='interact_many', arguments='{"actions": ["do"'))]))

@pytest.mark.parametrize('most, used, verdict', [(20, 20, 'truncated'), (20, 25, 'truncated'), (20, 19, 'malformed'), (None, 20, 'malformed'),
    (20, None, 'malformed'), (20, '20', 'malformed')])
def test_a_call_that_breaks_off_at_the_token_limit_was_cut_whatever_the_server_says(most, used, verdict):
    t,sent = once(HALF, max_tokens=most, usage=dict(prompt_tokens=3, completion_tokens=used))
    assert (t.reply.verdict, t.reply.actions) == (verdict, ())
    assert Agent('m', max_tokens=most).read(sent) == t.reply

def test_a_whole_call_at_the_token_limit_is_carried_out(): ask(max_tokens=2, usage=dict(prompt_tokens=3, completion_tokens=2))


def reply(content, *calls, **message):
    "What is read from a reply that makes `calls`, each (id, name, arguments)"
    sent = [dict(id=i, type='function', function=dict(name=n, arguments=a)) for i,n,a in calls]
    return read_reply(dict(index=0, finish_reason='tool_calls', message=dict(role='assistant', content=content, tool_calls=sent) | message))

def called(content, *calls, **more):
    "The assistant message that history shows"
    return dict(role='assistant', content=content, tool_calls=[dict(id=i, type='function', function=dict(name=n, arguments=a)) for i,n,a in calls], **more)

LEFT,JUMP,LOOK = [('a', 'interact_many', '{"actions": ["move_left"]}')], ('b', 'interact_many', '{"actions": ["jump"]}'), ('c', 'look', '{}')
PLAYED,UNUSABLE = reply('Left.', *LEFT, reasoning_content='Wood is left.'), reply('Up!', JUMP, LOOK)
SILENT = reply('Where am I?')
SYS,USER = dict(role='system', content=SYSTEM), dict(role='user', content='(step 1)')
DONE = dict(role='tool', tool_call_id='a', content='Done: move_left.')
REFUSED = [dict(role='tool', tool_call_id=i, content=UNUSABLE.problem) for i in 'bc']
TOLD = dict(role='user', content=f'{UNUSABLE.problem}\n\n(step 2)')
MEMORY = [TurnMemory('(step 1)', PLAYED), TurnMemory('(step 2)', UNUSABLE)]
THOUGHT = dict(reasoning_content='Wood is left.')

@pytest.mark.parametrize('history, past', [
    ('none', []),
    (1, [dict(role='user', content='(step 2)'), called('Up!', JUMP, LOOK), *REFUSED]),
    (9, [USER, called('Left.', *LEFT), DONE, dict(role='user', content='(step 2)'), called('Up!', JUMP, LOOK), *REFUSED]),
    ('full', [USER, called('Left.', *LEFT), DONE, dict(role='user', content='(step 2)'), called('Up!', JUMP, LOOK), *REFUSED])])
def test_what_is_sent_in_each_mode_of_history(history, past):
    assert Agent('m', history=history).payload(MEMORY, '(step 2)', 7) == dict(
        model='m', messages=[SYS, *past, TOLD], tools=[interact_many(8)], temperature=1., seed=7)

def test_kept_thoughts_are_in_history_once():
    sent = Agent('m', history='full', keep_thoughts=True).payload(MEMORY, '(step 2)')['messages']
    assert sent[2:4] == [called('Left.', *LEFT, **THOUGHT), DONE]
    assert sent[5] == called('Up!', JUMP, LOOK)  # here the thought is the content, which is there already

PIXEL = png(np.zeros((9, 9, 3), np.uint8))
PICTURED = dict(type='image_url', image_url=dict(url=data_url(PIXEL)))

@pytest.mark.parametrize('only, first, last', [
    (False, [dict(type='text', text='(step 1)'), PICTURED], [dict(type='text', text=TOLD['content']), PICTURED]),
    (True, [PICTURED], [dict(type='text', text=UNUSABLE.problem), PICTURED])])
@pytest.mark.parametrize('history', ['none', 1, 'full'])
def test_what_is_sent_with_vision(only, first, last, history):
    agent = Agent('m', history=history, use_vision=True, image_only_mode=only)
    memory = [TurnMemory(agent.content([], '(step 1)', PIXEL), UNUSABLE)]
    past = [] if history == 'none' else [dict(role='user', content=first), called('Up!', JUMP, LOOK), *REFUSED]
    told = dict(role='system', content=f'{SYSTEM}\n\n{PICTURE}')
    assert agent.payload(memory, '(step 2)', image=PIXEL)['messages'] == [told, *past, dict(role='user', content=last)]

def test_settings_that_nobody_made_are_not_sent_and_those_that_were_are():
    assert [*Agent('m').payload([], '(step 1)')] == ['model', 'messages', 'tools', 'temperature']
    made = dict(max_tokens=64, top_p=.9, thinking=False, tool_choice='required', parallel_tool_calls=False)
    sent = Agent('m', temperature=0., **made, extra=dict(top_k=5)).payload([], '(step 1)', seed=0)
    assert {k:sent[k] for k in sent.keys() - {'model', 'messages', 'tools'}} == made | dict(temperature=0., top_k=5, seed=0)
    assert Agent('m', tool_choice='interact_many').payload([], '')['tool_choice'] == dict(type='function', function=dict(name='interact_many'))
    assert 'tool_choice' not in Agent('m', tool_choice='auto').payload([], '')

EPISODE = [PLAYED, UNUSABLE, SILENT, reply('', *LEFT, reasoning='Left again.'), reply('<think>Trees.</think>Left.', *LEFT), reply('', ('d', 'interact_many', '{"act'))]

def prompts(agent):
    "The messages of each turn of an episode whose replies are `EPISODE`"
    memory,world = [],World(3)
    for n,o in enumerate([*EPISODE, None]):
        image = agent.image(world)
        yield agent.payload(memory, f'(step {n})', n, image)['messages']
        memory.append(TurnMemory(agent.content(memory, f'(step {n})', image), o))
        world.step(1)

@pytest.mark.parametrize('keep_thoughts', [False, True])
@pytest.mark.parametrize('vision', [{}, dict(use_vision=True), dict(use_vision=True, image_only_mode=True)])
def test_a_turn_begins_with_what_the_turn_before_was_sent(keep_thoughts, vision):
    sent = list(prompts(Agent('m', history='full', keep_thoughts=keep_thoughts, **vision)))
    for before,after in zip(sent, sent[1:]):
        assert after[:len(before)] == before
        assert all(a is b for a,b in zip(after, before[:-1]))  # the same objects: a trace knows them without looking at them
    assert [len(o) for o in sent] == [2, 5, 9, 11, 14, 17, 20]

def test_a_window_of_history_holds_the_last_turns_whole():
    assert [[m['role'] for m in o].count('user') for o in prompts(Agent('m', history=2))] == [1, 2, 3, 3, 3, 3, 3]

@pytest.mark.parametrize('history', ['none', 1, 3, 'full'])
def test_each_call_in_history_has_one_answer(history):
    for sent in prompts(Agent('m', history=history)):
        assert [(m['role']) for m in (sent[0], sent[-1])] == ['system', 'user']
        asked = [o['id'] for m in sent for o in m.get('tool_calls', ())]
        assert asked == [m['tool_call_id'] for m in sent if m['role'] == 'tool']
        for a,b in zip(sent, sent[1:]): assert b['role'] != 'assistant' or a['role'] == 'user'

def rendered(messages):
    "A chat template as many models have one: a thought is shown where the message holds it"
    def one(m):
        calls = ''.join(f'<call>{o["function"]["arguments"]}' for o in m.get('tool_calls', ()))
        thought = f'<think>{m["reasoning_content"]}</think>' if 'reasoning_content' in m else ''
        return f'<{m["role"]}>{thought}{m["content"]}{calls}'
    return ''.join(map(one, messages))

def first_mismatch(keep_thoughts):
    "Where the second prompt is not a continuation of the first with what the model wrote: what was written there, and what is shown; None"
    first,second,*_ = prompts(Agent('m', history='full', keep_thoughts=keep_thoughts))
    wrote,shown = rendered([*first, PLAYED.message | THOUGHT]), rendered(second)
    at = next((i for i,(a,b) in enumerate(zip(wrote, shown)) if a != b), None)
    return at and (wrote[at-11:at+7], shown[at-11:at+7])

def test_a_thought_left_out_of_history_breaks_the_prefix_and_a_kept_one_does_not():
    assert first_mismatch(keep_thoughts=True) is None
    assert first_mismatch(keep_thoughts=False) == ('<assistant><think>', '<assistant>Left.<c')

def test_an_agent_from_before_is_kept_as_it_was():
    agent = Agent('m', history=2, max_tokens=64)
    assert agent.config == dict(model='m', history=2, max_actions=8, temperature=1., max_tokens=64, system=SYSTEM)
    assert agent.prompt_id == digest(dict(system=SYSTEM, tools=[interact_many(8)]))

@pytest.mark.parametrize('name, value, changes_prompt', [('thinking', False, False), ('tool_choice', 'required', False), ('parallel_tool_calls', False, False),
    ('top_p', .9, False), ('use_vision', True, True), ('extra', dict(top_k=5), False), ('image_size', 180, False)])
def test_a_setting_that_was_made_tells_runs_apart(name, value, changes_prompt):
    agent = Agent('m', **{name:value})
    assert agent.config == Agent('m').config | {name:value}
    assert (agent.prompt_id != Agent('m').prompt_id) == changes_prompt
    hash(agent)

@pytest.mark.parametrize('settings, said', [
    (dict(history='all'), "history is 'all'"), (dict(history=0), 'history is 0'), (dict(history=True), 'history is True'), (dict(max_actions=0), 'max_actions is 0'),
    (dict(max_tokens=0), 'max_tokens is 0'), (dict(image_only_mode=True), 'use_vision is off'), (dict(use_vision=True, image_size=64), 'image_size is 64'),
    (dict(keep_thoughts=True), 'a history that is not shown'), (dict(keep_thoughts=True, history=2, thinking=False), 'thinking=False forbids'),
    (dict(tool_choice='look'), "tool_choice is 'look'"), (dict(extra=dict(seed=1)), 'extra holds seed'),
    (dict(extra=dict(messages=[], model='n', x=1)), 'extra holds model, messages'), (dict(extra=dict(stream=True)), 'extra holds stream')])
def test_settings_that_contradict_are_refused_with_a_way_out(settings, said):
    with pytest.raises(AgentError, match=said) as e: Agent('m', **settings)
    assert e.value.fix

def test_a_picture_is_there_if_and_only_if_the_agent_looks():
    with pytest.raises(AgentError, match='there is no picture'): Agent('m', use_vision=True).payload([], '(step 1)')
    with pytest.raises(AgentError, match='there is a picture'): Agent('m').payload([], '(step 1)', image=PIXEL)
    assert Agent('m').image(World(3)) is None

@pytest.mark.parametrize('size', [90, 180, 288, 300])
def test_the_picture_is_the_frame_in_256_colours(size):
    world,agent = World(29),Agent('m', use_vision=True, image_size=size)
    sent = agent.image(world)
    assert b64decode(data_url(sent).removeprefix('data:image/png;base64,')) == sent == agent.image(World(29))
    shown = np.array(Image.open(BytesIO(sent)).convert('RGB')).astype(int)
    assert shown.shape == (size, size, 3) and np.abs(shown - world.frame(size)).max() < 20

@pytest.mark.parametrize('steps, most', [(0, 8_000), (180, 36_000), (300, 36_000)])
def test_a_picture_is_small_even_in_the_grain_of_the_night(steps, most):
    world = World(29, 'peaceful', length=1000)
    for _ in range(steps): world.step(0)
    assert len(Agent('m', use_vision=True).image(world)) < most

def answer(body, attempts, agent=Agent('m'), cost=.25):
    "A turn with a client whose `post` returns `body` and `attempts`"
    async def post(sent): return body, attempts
    client = SimpleNamespace(endpoint=SimpleNamespace(in_process=False), post=post, cost=lambda model, usage: cost)
    return asyncio.run(turn(agent, client, [], '(step 1)'))

def test_a_deadline_is_handed_to_the_client_and_to_none_that_knows_of_none():
    asked = []
    async def post(sent, **how):
        asked.append(how)
        return SAID, [{}]
    client = SimpleNamespace(endpoint=SimpleNamespace(in_process=False), post=post, cost=lambda model, usage: None)
    for o in (None, 12.5): asyncio.run(turn(Agent('m'), client, [], '(step 1)', deadline=o))
    assert asked == [{}, dict(deadline=12.5)]

SAID = dict(choices=[dict(finish_reason='tool_calls', message=dict(role='assistant', content='I go.', tool_calls=[CALL]))], usage=dict(prompt_tokens=3, completion_tokens=2))

@pytest.mark.parametrize('attempts, cost, cached, costs', [([{}], .25, False, .25), ([{}], None, False, None), ([], .25, True, 0.), ([], None, True, 0.)])
def test_a_reply_from_the_cache_costs_nothing(attempts, cost, cached, costs):
    t = answer(SAID, attempts, cost=cost)
    assert (t.cached, t.cost, t.reply.actions) == (cached, costs, ('move_left', 'do'))

def test_all_five_counts_are_kept():
    usage = dict(prompt_tokens=30, completion_tokens=20, prompt_tokens_details=dict(cached_tokens=10), completion_tokens_details=dict(reasoning_tokens=5))
    assert answer(SAID | dict(usage=usage), [{}]).usage == dict(prompt_tokens=30, completion_tokens=20, cached_tokens=10, cache_write_tokens=0, reasoning_tokens=5)

def test_a_call_that_the_server_could_not_read_is_told_to_the_model():
    "Groq answers 400 `tool_use_failed`; the client makes a reply of what the model wrote"
    failed = dict(role='assistant', content='<tool_call>{"name": "interact_many", "arguments": {"actions": ["do",')
    t = answer(dict(choices=[dict(index=0, finish_reason='tool_use_failed', message=failed)], error=dict(code='tool_use_failed')), [{}])
    assert (t.reply.verdict, t.reply.actions, t.usage['completion_tokens']) == ('malformed', (), None)
    assert Agent('m').payload([t.memory], '(step 1)')['messages'][1]['content'] == f'{t.reply.problem}\n\n(step 1)'
