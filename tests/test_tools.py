"Reading replies: the dialects and faults met in the wild, and what must never happen whatever comes in"
import json

import pytest
from hypothesis import given, settings, strategies as st

from synth_lab.tools import interact_many, read_reply, tool_messages
from synth_lab.world import ACTIONS


def call(arguments, name='interact_many', id='c1'): return dict(id=id, type='function', function=dict(name=name, arguments=arguments))

def choice(*calls, content=None, finish='tool_calls', **kw):
    return dict(finish_reason=finish, message=dict(role='assistant', content=content, tool_calls=list(calls), **kw))

def said(content, finish='stop', **kw): return dict(finish_reason=finish, message=dict(role='assistant', content=content, **kw))

ARGS = '{"actions": ["move_left", "do"]}'
TAGGED = f'<tool_call>{{"name": "interact_many", "arguments": {ARGS}}}</tool_call>'
OK = ('move_left', 'do')

GOOD = {
    'string': choice(call(ARGS)),
    'object': choice(call(json.loads(ARGS))),
    'encoded twice': choice(call(json.dumps(ARGS))),
    'function_call': dict(message=dict(function_call=dict(name='interact_many', arguments=ARGS))),
    'tool_call in text': said('I go.\n' + TAGGED),
    'tool_call after think': said(f'<think>or {TAGGED.replace("do", "sleep")}?</think>' + TAGGED),
    'think opened by the template': said('hm</think>\n' + TAGGED),
    'tool_call never closed': said(TAGGED.removesuffix('</tool_call>')),
    'tool_call with arguments encoded': said(json.dumps(dict(name='interact_many', arguments=ARGS)).join(['<tool_call>', '</tool_call>'])),
    'bare arguments': said('Here: ' + ARGS),
    'bare, fenced': said(f'```json\n{ARGS}\n```'),
    'bare with name and parameters': said(f'{{"name": "interact_many", "parameters": {ARGS}}}'),
    'aliases': choice(call('{"actions": ["left", "use"]}')),
    'older tool': choice(call('{"actions": ["move_left", "do"], "reasoning": "tree"}', name='interact')),
    'parallel': choice(call('{"actions": ["move_left"]}'), call('{"actions": ["do"]}', id='c2')),
    'content in parts': said([dict(type='text', text='go '), dict(type='text', text=TAGGED)]),
    'cut after the call was whole': choice(call(ARGS), finish='length'),
}

@pytest.mark.parametrize('kind', GOOD)
def test_good(kind):
    reply = read_reply(GOOD[kind])
    assert (reply.verdict, reply.actions, reply.problem) == ('ok', OK, None)
    [sent] = reply.message['tool_calls']
    assert json.loads(sent['function']['arguments']) == dict(actions=list(OK))
    assert [o['tool_call_id'] for o in tool_messages(reply)] == [sent['id']]

BAD = {
    'no call': (said('I would go left.'), 'no_call'),
    'empty': (said(''), 'no_call'),
    'thinking only': (said(f'<think>maybe {TAGGED}'), 'no_call'),
    'thinking cut': (said('<think>maybe', finish='length'), 'truncated'),
    'half a call': (choice(call('{"actions": ["move_left"')), 'malformed'),
    'half a call at the limit': (choice(call('{"actions": ["move_left"'), finish='length'), 'truncated'),
    'arguments not begun at the limit': (choice(call(''), finish='length'), 'truncated'),
    'salvaged tail': (choice(call('["move_left","do"')), 'malformed'),
    'glued': (choice(call(ARGS + ARGS)), 'malformed'),
    'trailing comma': (choice(call('{"actions": ["do",]}')), 'malformed'),
    'unquoted key': (choice(call('{actions: ["do"]}')), 'malformed'),
    'a name twice': (choice(call('{"actions": ["do"], "actions": ["sleep"]}')), 'malformed'),
    'a list': (choice(call('["do"]')), 'malformed'),
    'very deep': (choice(call('[' * 100_000)), 'malformed'),
    'no arguments': (choice(call('')), 'invalid_action'),
    'null arguments': (choice(call(None)), 'invalid_action'),
    'no actions': (choice(call('{"actions": []}')), 'invalid_action'),
    'unknown action': (choice(call('{"actions": ["move_left", "jump"]}')), 'invalid_action'),
    'number': (choice(call('{"actions": [1]}')), 'invalid_action'),
    'too many': (choice(call(json.dumps(dict(actions=['do'] * 9)))), 'invalid_action'),
    'unknown tool': (choice(call(ARGS, name='act_now')), 'unknown_tool'),
    'one of two is broken': (choice(call(ARGS), call('{"actions": ["do"', id='c2')), 'malformed'),
    'second block cut': (said(TAGGED + '<tool_call>{"name": "inter', finish='length'), 'truncated'),
    'whole object in a broken one': (said('{"name": "interact_many", "arguments": {"actions": ["do"]}'), 'malformed'),
    'two bare objects': (said(f'{ARGS} or {ARGS}'), 'malformed'),
    'a whole and a half': (said(f'{ARGS} then {{"actions": ["sl'), 'malformed'),
    'refused': (said(None, refusal='No.'), 'refused'),
    'filtered': (said('', finish='content_filter'), 'refused'),
}

@pytest.mark.parametrize('kind', BAD)
def test_bad(kind):
    given_choice, verdict = BAD[kind]
    reply = read_reply(given_choice)
    assert (reply.verdict, reply.actions) == (verdict, ())
    assert 'interact_many' in reply.problem and '\n' not in reply.problem

AT_THE_LIMIT = {'half a call':'truncated', 'no call':'truncated', 'unknown action':'invalid_action', 'filtered':'refused'}

@pytest.mark.parametrize('kind, verdict', AT_THE_LIMIT.items())
def test_a_reply_at_the_token_limit_is_known_to_be_cut(kind, verdict): assert read_reply(BAD[kind][0], cut=True).verdict == verdict

def test_unknown_names_are_listed():
    assert 'place_furnace' in read_reply(BAD['unknown action'][0]).problem
    assert '"act_now"' in read_reply(BAD['unknown tool'][0]).problem

def test_history_is_well_formed_and_the_trace_verbatim():
    raw = '{"actions": ["move_left"'
    reply = read_reply(choice(call(raw, name='act now!'), call(raw, id='c2')))
    assert [o.arguments for o in reply.calls] == [raw, raw] and reply.calls[0].name == 'act now!'
    assert [o['function'] for o in reply.message['tool_calls']] == [dict(name='act_now_', arguments='{}'), dict(name='interact_many', arguments='{}')]
    assert [o['tool_call_id'] for o in tool_messages(reply)] == ['c1', 'c2']

@pytest.mark.parametrize('message, thought', [
    (dict(reasoning_content='r', content='c'), 'r'), (dict(reasoning='r', content='<think>t</think>c'), 'r'),
    (dict(content='<think>t</think>c'), 't'), (dict(content='c'), 'c'), (dict(content=None), None), (dict(reasoning='', content='c'), 'c')])
def test_thought(message, thought):
    assert read_reply(dict(message=message | dict(tool_calls=[call(ARGS)]))).thought == thought

@pytest.mark.parametrize('ids', [('c', 'c'), ('', 'x'), (None, None)])
def test_ids_tell_calls_apart(ids):
    reply = read_reply(choice(*(call('{', id=o) for o in ids)))
    assert [o['tool_call_id'] for o in tool_messages(reply)] == [o['id'] for o in reply.message['tool_calls']] == ['call_0', 'call_1']

def test_the_tool_names_every_action():
    items = interact_many()['function']['parameters']['properties']['actions']
    assert items['items']['enum'] == list(ACTIONS) and (items['minItems'], items['maxItems']) == (1, 8)


text = st.text() | st.sampled_from([ARGS, TAGGED, '<think>', '</think>', '<tool_call>', '{"', '"actions"'])
keys = st.text() | st.sampled_from(['message', 'content', 'tool_calls', 'function', 'name', 'arguments', 'id', 'text', 'finish_reason', 'reasoning',
    'function_call', 'refusal', 'actions'])
anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda o: st.lists(o, max_size=4) | st.dictionaries(keys, o, max_size=5), max_leaves=25)

@settings(max_examples=400, deadline=None, derandomize=True)
@given(anything)
def test_nothing_raises(value):
    for given_choice in (value, dict(message=value), dict(message=dict(content=value, tool_calls=value)), choice(call(value))):
        reply = read_reply(given_choice)
        assert (reply.verdict == 'ok') == bool(reply.actions) == (reply.problem is None)
        assert set(reply.actions) <= set(ACTIONS)
        json.dumps(reply.message).encode()
        assert all(isinstance(json.loads(o['function']['arguments']), dict) for o in reply.message.get('tool_calls', ()))
        assert len(tool_messages(reply)) == len(reply.message.get('tool_calls', ()))

actions = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8)

@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions, st.data())
def test_no_prefix_of_a_call_is_executed(names, data):
    args = json.dumps(dict(actions=names))
    body = json.dumps(dict(name='interact_many', arguments=dict(actions=names)))
    cut = lambda s: s[:data.draw(st.integers(0, len(s) - 1))]
    for given_choice in (choice(call(cut(args))), choice(call(cut(json.dumps(args)))), said(cut(args)), said('<tool_call>' + cut(body)),
        said('hm</think>' + cut(body)), choice(call(args), call(cut(args), id='c2'))):
        assert read_reply(given_choice).actions == ()

@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions, st.integers(0, 300), st.text(max_size=3))
def test_an_action_stands_in_the_text(names, at, noise):
    body = json.dumps(dict(name='interact_many', arguments=dict(actions=names)))
    broken = body[:at] + noise + body[at + 1:]
    for given_choice in (said(broken), said(f'<tool_call>{broken}</tool_call>'), choice(call(broken))):
        assert all(o in broken for o in read_reply(given_choice).actions)
