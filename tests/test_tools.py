"Reading replies: the dialects and faults met in the wild, and what must never happen whatever comes in"
import json, re

import orjson, pytest
from hypothesis import example, given, settings, strategies as st

from synth_lab.tools import FORMATS, THOUGHTS, interact_many, read_reply, split_think, tool_messages
from synth_lab.view import ALIASES
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
    assert [o['tool_call_id'] for o in tool_messages(reply)] == [o['id'] for o in reply.message['tool_calls']] == ['call00000', 'call00001']

def test_the_tool_names_every_action():
    items = interact_many()['function']['parameters']['properties']['actions']
    assert items['items']['enum'] == list(ACTIONS) and (items['minItems'], items['maxItems']) == (1, 8)



def strict(schema):
    "Whether OpenAI's strict mode takes `schema`: a subset of JSON Schema in which each object is closed and needs all it has"
    known = {'object': {'properties', 'required', 'additionalProperties'}, 'array': {'items', 'minItems', 'maxItems'}, 'string': {'enum'}}[schema['type']]
    inner = [*schema.get('properties', {}).values(), *([schema['items']] if schema['type'] == 'array' else [])]
    closed = schema['type'] != 'object' or (schema['additionalProperties'] is False and schema['required'] == list(schema['properties']))
    return set(schema) <= known | {'type', 'description'} and closed and all(map(strict, inner))

def test_the_schema_fits_strict_mode():
    function = interact_many(5)['function']
    assert strict(function['parameters']) and set(function) == {'name', 'description', 'parameters'}
    assert not strict(dict(type='object', properties=dict(a=dict(type='string')), required=[], additionalProperties=False))


def arguments(names): return json.dumps(dict(actions=names))
def named(names, key='arguments'): return json.dumps({'name': 'interact_many', key: dict(actions=names)})

V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>interact_many\n```json\n{}\n```<｜tool▁call▁end｜>'
WRITTEN = {
    'hermes': lambda o: f'<tool_call>\n{named(o)}\n</tool_call>',
    'hermes, function_call': lambda o: f'<function_call> {named(o)} </function_call>',
    'granite': lambda o: f'<|tool_call|>[{named(o)}]',
    'phi': lambda o: f'<|tool_call|>[{named(o)}]<|/tool_call|>',
    'qwen': lambda o: f'<tool_call>\n<function=interact_many>\n<parameter=actions>\n{json.dumps(o)}\n</parameter>\n</function>\n</tool_call>',
    'qwen, no wrapper': lambda o: f'<function=interact_many>\n<parameter=actions>\n{json.dumps(o)}\n</parameter>\n</function>\n</tool_call>',
    'qwen, as Python': lambda o: f'<function=interact_many><parameter=actions>{o}</parameter></function>',
    'llama': lambda o: f'<function=interact_many>{arguments(o)}</function>',
    'llama, no bracket': lambda o: f'<function=interact_many{arguments(o)}</function>',
    'llama, equals sign': lambda o: f'<function=interact_many={arguments(o)}</function>',
    'llama, no mark': lambda o: f'interact_many{arguments(o)}</function>',
    'python': lambda o: f'<|python_tag|>{named(o, "parameters")}<|eom_id|>',
    'pythonic': lambda o: f'[interact_many(actions={o})]',
    'pythonic, double quotes': lambda o: f'[interact_many(actions={json.dumps(o)})]',
    'glm': lambda o: f'<tool_call>interact_many\n<arg_key>actions</arg_key>\n<arg_value>{json.dumps(o)}</arg_value>\n</tool_call>',
    'glm, no mark': lambda o: f'interact_many\n{arguments(o)}',
    'mistral': lambda o: f'[TOOL_CALLS] [{named(o)}]',
    'mistral, with id': lambda o: '[TOOL_CALLS]' + json.dumps([dict(json.loads(named(o)), id='aB3dE6gH9')]) + '</s>',
    'tekken': lambda o: f'[TOOL_CALLS]interact_many[ARGS]{arguments(o)}',
    'tekken, with id': lambda o: f'[TOOL_CALLS]interact_many[CALL_ID]aB3dE6gH9[ARGS]{arguments(o)}</s>',
    'deepseek': lambda o: f'<｜tool▁calls▁begin｜>{V3.replace("{}", arguments(o))}<｜tool▁calls▁end｜>',
    'deepseek 3.1': lambda o: f'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>interact_many<｜tool▁sep｜>{arguments(o)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    'deepseek 3.2': lambda o: f'<｜DSML｜function_calls>\n<｜DSML｜invoke name="interact_many">\n<｜DSML｜parameter name="actions" string="false">'
        f'{json.dumps(o)}</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    'invoke': lambda o: f'<minimax:tool_call>\n<invoke name="interact_many">\n<parameter name="actions">{json.dumps(o)}</parameter>\n</invoke>\n</minimax:tool_call>',
    'kimi': lambda o: '<|tool_calls_section_begin|><|tool_call_begin|>functions.interact_many:0<|tool_call_argument_begin|>'
        f'{arguments(o)}<|tool_call_end|><|tool_calls_section_end|>',
    'harmony': lambda o: f'<|channel|>commentary to=functions.interact_many <|constrain|>json<|message|>{arguments(o)}<|call|>',
    'harmony, whole': lambda o: '<|channel|>analysis<|message|>Trees give wood.<|end|><|start|>assistant<|channel|>commentary to=functions.interact_many '
        f'<|constrain|>json<|message|>{arguments(o)}<|call|>',
    'harmony, analysis': lambda o: f'<|channel|>analysis to=functions.interact_many code<|message|>{arguments(o)}<|call|>',
    'harmony, in the role': lambda o: f'<|start|>assistant to=functions.interact_many<|channel|>commentary json<|message|>{arguments(o)}<|call|>',
    'harmony, tokens stripped': lambda o: f'commentary to=functions.interact_many json{arguments(o)}',
    'gemma': lambda o: '<|tool_call>call:interact_many{actions:' + json.dumps(o).replace('"', '<|"|>') + '}<tool_call|>',
    'bare arguments': arguments,
    'bare call': named,
    'bare list': lambda o: f'[{named(o, "parameters")}]',
    'fence': lambda o: f'```json\n{named(o)}\n```',
    'tool_calls in a fence': lambda o: '```\n' + json.dumps(dict(tool_calls=[dict(id='pending', type='function', function=dict(name='interact_many'),
        parameters=dict(actions=o))])) + '\n```',
}

@pytest.mark.parametrize('kind', WRITTEN)
@pytest.mark.parametrize('before', ['', 'A tree is on my left.\n', '<think>or ["sleep"]?</think>I go.\n'])
def test_each_format_is_read(kind, before):
    reply = read_reply(said(before + WRITTEN[kind](list(OK))))
    assert (reply.verdict, reply.actions, [o.name for o in reply.calls]) == ('ok', OK, ['interact_many'])
    if kind != 'harmony, whole': assert reply.message['content'] == {'':'', 'A':'A tree is on my left.', '<':'I go.'}[before[:1]]
    valid_history(reply)

def test_each_format_has_an_example(): assert set(FORMATS) <= {o.split(',')[0] for o in WRITTEN}

@pytest.mark.parametrize('kind', WRITTEN)
@pytest.mark.parametrize('finish', ['stop', 'length'])
def test_no_prefix_of_a_written_call_is_executed(kind, finish):
    "Wherever a text ends, it says the whole plan or nothing; at the token limit it says why"
    names = ['move_left', 'do', 'place_table']
    whole = WRITTEN[kind](names)
    for at in range(len(whole)):
        for before in ('', 'I go.\n', 'hm</think>'):
            reply = read_reply(said(before + whole[:at], finish))
            if reply.verdict == 'ok': assert reply.actions == tuple(names) and contained(whole[:at], names), whole[:at]
            else: assert reply.actions == () and (finish == 'stop' or reply.verdict == 'truncated'), (whole[:at], reply)
            valid_history(reply)

@pytest.mark.parametrize('kind', WRITTEN)
def test_no_end_of_a_written_call_is_half_executed(kind):
    "The same for a reply whose beginning is lost"
    names = ['move_left', 'do', 'place_table']
    whole = WRITTEN[kind](names)
    assert {read_reply(said(whole[at:])).actions for at in range(len(whole))} <= {(), tuple(names)}

GLUED = [(k, o) for k in WRITTEN for o in ('OO', 'O,O', 'O; O', 'O or O', '[O', 'O}', '{O', 'Ox', 'O]') if arguments(['do']) in WRITTEN[k](['do'])]
BARE = ('bare arguments', 'llama, no mark', 'glm, no mark') # prose may follow JSON that no mark closes

@pytest.mark.parametrize('kind, broken', [(k, o) for k, o in GLUED if k not in BARE or o not in ('Ox', 'O]')])
def test_glued_arguments_are_malformed_in_each_format(kind, broken):
    assert read_reply(said(WRITTEN[kind](['do']).replace(arguments(['do']), broken.replace('O', arguments(['do']))))).verdict == 'malformed'


CASES = {
    'PARSE 12, encoded twice': (choice(call(r'"{\"actions\": [\"move_left\", \"do\"]}"')), 'ok'),
    'PARSE 12, the list encoded within': (choice(call(json.dumps(dict(actions='["move_left", "do"]')))), 'ok'),
    'PARSE 12, the list within cut': (choice(call(json.dumps(dict(actions='["move_left", "do"')))), 'malformed'),
    'PARSE 12, not JSON within': (choice(call('"move_left"')), 'malformed'),
    'PARSE 13, malformed arguments': (choice(call('{"actions": ["move_left"')), 'malformed'),
    'PARSE 15, glued': (choice(call('{"actions": ["move_left"]}{"actions": ["do"]}')), 'malformed'),
    'PARSE 15, glued in text': (said('<tool_call>{"name": "interact_many", "arguments": {"actions": ["move_left"]}}\n'
        '{"name": "interact_many", "arguments": {"actions": ["do"]}}</tool_call>'), 'malformed'),
    'PARSE 15, parallel': (choice(call('{"actions": ["move_left"]}'), call('{"actions": ["do"]}', id='c2')), 'ok'),
    'PARSE 16, trailing comma': (choice(call('{"actions": ["move_left", "do",]}')), 'malformed'),
    'PARSE 16, trailing comma after the list': (choice(call('{"actions": ["move_left", "do"],}')), 'malformed'),
    'PARSE 16, unquoted key': (choice(call('{actions: ["move_left", "do"]}')), 'malformed'),
    'PARSE 16, single quotes': (choice(call("{'actions': ['move_left', 'do']}")), 'malformed'),
    'PARSE 16, comment': (choice(call('{"actions": ["move_left", "do"] /* tree */}')), 'malformed'),
    'PARSE 16, a fence around': (choice(call(f'```json\n{ARGS}\n```')), 'ok'),
    'PARSE 18, empty': (choice(call('')), 'invalid_action'),
    'PARSE 18, null': (choice(call(None)), 'invalid_action'),
    'PARSE 18, null as text': (choice(call('null')), 'invalid_action'),
    'PARSE 18, empty and encoded': (choice(call('""')), 'invalid_action'),
    'PARSE 18, empty, of a tool without arguments': (choice(call('', name='look')), 'unknown_tool'),
    'PARSE 20, call after the thought': (said(f'<think>{TAGGED.replace("do", "sleep")}</think>{TAGGED}'), 'ok'),
    'PARSE 20, call within the thought': (said(f'<think>{TAGGED}</think>I wait.'), 'no_call'),
    'PARSE 20, call within a second thought': (said(f'<think>a tree</think>I wait. <think>or {TAGGED}'), 'no_call'),
    'PARSE 20, call within the reasoning': (dict(message=dict(content='', reasoning_content=TAGGED)), 'no_call'),
    'PARSE 20, call within a thinking part': (said([dict(type='thinking', thinking=[dict(type='text', text=TAGGED)]), dict(type='text', text='I wait.')]), 'no_call'),
    'PARSE 20, call within a reasoning part': (said([dict(type='reasoning', text=TAGGED)]), 'no_call'),
    'PARSE 20, Mistral': (said(f'[THINK]{TAGGED.replace("do", "sleep")}[/THINK]{TAGGED}'), 'ok'),
    'PARSE 20, harmony': (said(f'<|channel|>analysis<|message|>{TAGGED}<|end|><|start|>assistant<|channel|>final<|message|>I wait.'), 'no_call'),
    'PARSE 23, unknown tool': (choice(call(ARGS, name='act_now')), 'unknown_tool'),
    'PARSE 23, unknown tool in text': (said(TAGGED.replace('interact_many', 'act_now')), 'unknown_tool'),
    'PARSE 23, unknown tool before the brace': (said(f'act_now{ARGS}</function>'), 'unknown_tool'),
    'PARSE 23, unknown tool beside its actions': (said('{"name": "act_now", "actions": ["do"]}'), 'unknown_tool'),
    'PARSE 23, no name': (choice(dict(id='c', function=dict(arguments=ARGS))), 'unknown_tool'),
    'PARSE 23, namespace': (choice(call(ARGS, name='functions.interact_many')), 'ok'),
    'PARSE 23, a marker left on the name': (choice(call(ARGS, name='interact_many<|channel|>commentary')), 'ok'),
    'PARSE 32, cut, but finish tool_calls': (choice(call('{"actions": ["move_left", "do"')), 'truncated'),
    'PARSE 32, whole at the limit': (choice(call(ARGS)), 'ok'),
    'PARSE 35, salvaged tail': (choice(call('["move_left","do"')), 'malformed'),
    'PARSE 35, salvaged tail in the object': (choice(call('{"actions": ["move_left","do"]')), 'malformed'),
    'PARSE 35, salvaged tail in a tag': (said('<function=interact_many><parameter=actions>["move_left", "do"]'), 'malformed'),
    'PARSE 35, broken list in a tag': (said('<function=interact_many><parameter=actions>["move_left", "do"</parameter></function>'), 'malformed'),
    'SRV 25, object': (choice(call(dict(actions=['move_left', 'do']))), 'ok'),
    'SRV 29, failed generation is a call': (said(f'<function=interact_many>{ARGS}</function>', 'tool_use_failed'), 'ok'),
    'SRV 29, failed generation is cut': (said('<function=interact_many>{"actions": ["move_left", "do"', 'tool_use_failed'), 'malformed'),
    'SRV 29, failed generation is of another tool': (said('web_search{"query": "tree"}</function>', 'tool_use_failed'), 'unknown_tool'),
    'SRV 29, failed generation names no action': (said('{"name": "interact_many", "arguments": {"actions": ["jump"]}}', 'tool_use_failed'), 'invalid_action'),
    'SRV 29, failed generation is prose': (said('I would go left.', 'tool_use_failed'), 'no_call'),
    'SRV 29, failed generation is empty': (said('', 'tool_use_failed'), 'malformed'),
    'SRV 30, not in request.tools': (said('', 'tool_use_failed') | dict(error=dict(message="attempted to call tool 'act' which was not in request.tools")), 'unknown_tool'),
    'SRV 30, schema': (said('', 'tool_use_failed') | dict(error=dict(message='parameters for tool interact_many did not match schema')), 'invalid_action'),
    'refusal, a field': (said(None, refusal='I cannot help with that.'), 'refused'),
    'refusal, a part': (said([dict(type='refusal', refusal='I cannot help with that.')]), 'refused'),
    'refusal, null': (choice(call(ARGS), refusal=None), 'ok'),
    'refusal, filtered in the middle of a call': (choice(call('{"actions": ["move_left"'), finish='content_filter'), 'refused'),
    'refusal, Anthropic': (said('', 'refusal'), 'refused'),
    'refusal, Gemini': (said('', 'SAFETY'), 'refused'),
    'limit, Anthropic': (said('<tool_call>{"name"', 'max_tokens'), 'truncated'),
    'limit, Mistral': (said('[TOOL_CALLS]interact_many[ARGS]{"actions": ["do', 'model_length'), 'truncated'),
    'call among the parts': (said([dict(type='text', text='I go.'), dict(type='tool_use', id='t', name='interact_many', input=json.loads(ARGS))]), 'ok'),
    'call without `function`': (choice(dict(id='c', name='interact_many', arguments=ARGS)), 'ok'),
    'arguments twice': (choice(dict(id='c', name='interact_many', arguments=ARGS, input=json.loads(ARGS))), 'malformed'),
    'JSON that is no call': (said('The map is {"tree": [3, 4]}.'), 'no_call'),
    'prose of a call': (said('I would call interact_many with move_left.'), 'no_call'),
    'an answer invented after the call': (said(TAGGED + '<tool_response>{"wood": 1}</tool_response>'), 'ok'),
    'something between the arguments': (said('<function=interact_many><parameter=actions>["move_left", "do"]</parameter> or sleep</function>'), 'malformed'),
    'an argument twice': (said('<function=interact_many><parameter=actions>["do"]</parameter><parameter=actions>["sleep"]</parameter></function>'), 'malformed'),
    'arguments where the tool should stand': (said(f'<｜tool▁call▁begin｜>{ARGS}'), 'malformed'),
    'one action without quotes or list': (said('<function=step><parameter=action>do</parameter></function><function=step><parameter=action>jump</parameter></function>'), 'invalid_action'),
    'two blocks': (said(TAGGED.replace(', "do"', '') + TAGGED.replace('"move_left", ', '')), 'ok'),
}

@pytest.mark.parametrize('case', CASES)
def test_case(case):
    given_choice, verdict = CASES[case]
    reply = read_reply(given_choice, cut=case.startswith('PARSE 32'))
    assert (reply.verdict, reply.actions) == (verdict, OK if verdict == 'ok' else ())
    assert (reply.problem is None) == (verdict == 'ok') and (verdict == 'ok' or 'call interact_many' in reply.problem)
    valid_history(reply)

def test_PARSE_13_a_malformed_call_is_answered_under_its_id():
    reply = read_reply(CASES['PARSE 13, malformed arguments'][0])
    [answer] = tool_messages(reply)
    assert (answer['tool_call_id'], answer['content']) == ('c1', reply.problem) and 'not one valid JSON object' in reply.problem

@pytest.mark.parametrize('sent', [ARGS, json.loads(ARGS), json.dumps(ARGS), json.dumps(json.dumps(ARGS))])
def test_SRV_26_27_arguments_go_back_encoded_once(sent):
    [back] = read_reply(choice(call(sent))).message['tool_calls']
    assert back == call(ARGS)

def test_SRV_26_unusable_arguments_go_back_encoded_once():
    [back] = read_reply(choice(call(json.dumps('{"actions": ["jump"]}')))).message['tool_calls']
    assert back == call('{"actions": ["jump"]}')

@pytest.mark.parametrize('arguments', ['{"x": NaN}', '{"x": 1e999}', r'{"x": "\ud800"}', '{"x": ' + '9' * 5000 + '}', '{"x": ' + '[' * 900 + ']' * 900 + '}'])
def test_what_other_parsers_refuse_does_not_go_back(arguments):
    valid_history(read_reply(choice(call(arguments))))

def test_control_tokens_do_not_go_back():
    "A chat template would take them for the end of the turn"
    reply = read_reply(said('<|channel|>final<|message|>I wait.<|im_end|><｜end▁of▁sentence｜><|return|>'))
    assert (reply.verdict, reply.message['content']) == ('no_call', 'I wait.')

@pytest.mark.parametrize('message, thought', [
    (dict(reasoning_content='', reasoning='r', content='c'), 'r'), (dict(thinking='r', content='c'), 'r'),
    (dict(reasoning_details=[dict(type='reasoning.summary', summary='s'), dict(type='reasoning.encrypted', data='x'), dict(type='reasoning.text', text='t')], content='c'), 's\nt'),
    (dict(content=[dict(type='thinking', thinking=[dict(type='text', text='a'), dict(type='text', text='b')]), dict(type='text', text='c')]), 'a\nb'),
    (dict(content=[dict(type='thinking', thinking='a', signature='x'), dict(type='text', text='c')]), 'a'),
    (dict(content=[dict(type='redacted_thinking', data='x'), dict(type='text', text='c')]), 'c'),
    (dict(content=[dict(type='reasoning', summary=[dict(type='summary_text', text='a')]), dict(type='output_text', text='c')]), 'a'),
    (dict(content='[THINK]t[/THINK]c'), 't'), (dict(content='<thinking>t</thinking>c'), 't'),
    (dict(content='<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>c'), 't')])
def test_thought_is_found_where_servers_put_it(message, thought):
    reply = read_reply(dict(message=message | dict(tool_calls=[call(ARGS)])))
    assert (reply.verdict, reply.thought, reply.message['content']) == ('ok', thought, 'c')

@pytest.mark.parametrize('opened, closed', THOUGHTS.items())
def test_an_unfinished_thought_has_no_answer(opened, closed):
    assert split_think(f'{opened}or {TAGGED}') == (f'or {TAGGED}', '')
    assert split_think(f'{opened}a{closed}b{opened}{TAGGED}') == (f'a\n{TAGGED}', 'b')

def test_our_ids_pass_mistrals_templates():
    reply = read_reply(said(TAGGED * 3), max_actions=6)
    assert [o.id for o in reply.calls] == ['call00000', 'call00001', 'call00002'] and all(re.fullmatch('[a-zA-Z0-9]{9}', o.id) for o in reply.calls)


# What must hold whatever comes in, against judges of our own that share no code with the library

def refuse(constant): raise ValueError(constant)

def valid_history(reply):
    "Whether a strict server would take the reply's message with its answers"
    message, answers = reply.message, tool_messages(reply)
    orjson.dumps([message, *answers])
    calls = message.get('tool_calls', [])
    assert set(message) == {'role', 'content'} | ({'tool_calls'} if calls else set()) and message['role'] == 'assistant' and type(message['content']) is str
    assert not re.search(r'<\|(?:im_start|im_end|call|end|return|channel|message)\|>', message['content'])
    for o in calls:
        assert set(o) == {'id', 'type', 'function'} and set(o['function']) == {'name', 'arguments'} and o['type'] == 'function' and o['id']
        assert re.fullmatch('[A-Za-z0-9_-]{1,64}', o['function']['name'])
        assert type(json.loads(o['function']['arguments'].encode(), parse_constant=refuse)) is dict
    assert len({o['id'] for o in calls}) == len(calls)
    assert [(o['role'], o['tool_call_id']) for o in answers] == [('tool', o['id']) for o in calls] and all(o['content'] and set(o) == {'role', 'tool_call_id', 'content'} for o in answers)

def plans(text):
    "Every list of actions that `text` spells out whole, in JSON, in JSON within JSON, in Python or in a tag"
    meant = lambda o: ALIASES.get(re.sub(r'[\s-]+', '_', o.strip().lower()), re.sub(r'[\s-]+', '_', o.strip().lower()))
    for _ in range(4):
        for t in (text, text.replace('<|"|>', '"'), text.replace("'", '"')):
            for i in (m.start() for m in re.finditer(r'\[', t)):
                for j in (m.end() for m in re.finditer(r'\]', t[i:])):
                    try: found = json.loads(t[i:i+j])
                    except (ValueError, RecursionError): continue
                    if isinstance(found, list) and found and all(isinstance(o, str) for o in found): yield tuple(map(meant, found))
            for o in re.findall(r'"actions?"\s*:\s*"([^"\\]*)"|<(?:parameter|arg_value)[^<>]*>([^<>]*)</', t): yield (meant(''.join(o)),)
        text = re.sub(r'\\(["\\])', r'\1', text)

def contained(text, actions):
    "Whether `actions` are whole plans that `text` spells out, one after the other"
    found, ends = set(plans(text)), {0}
    for at in range(len(actions)):
        if at in ends: ends |= {at + len(o) for o in found if tuple(actions[at:at + len(o)]) == o}
    return len(actions) in ends

def test_the_judge_knows_a_salvaged_plan():
    assert contained(ARGS, OK) and contained(json.dumps(ARGS), OK) and contained('<parameter=actions>do</parameter>', ('do',))
    assert contained('{"actions": ["do"]}{"actions": ["sleep"]}', ('do', 'sleep')) and contained('{"action": "go left"}', ('move_left',))
    for text in ('{"actions": ["move_left", "do"', '["move_left", "do", "sleep"]', '["move_left"', 'move_left do'): assert not contained(text, OK)

text = st.text() | st.sampled_from([ARGS, TAGGED, '<think>', '</think>', '<tool_call>', '{"', '"actions"'])
keys = st.text() | st.sampled_from(['message', 'content', 'tool_calls', 'function', 'name', 'arguments', 'id', 'text', 'finish_reason', 'reasoning',
    'function_call', 'refusal', 'actions', 'type', 'thinking', 'reasoning_details', 'input', 'error'])
anything = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | text,
    lambda o: st.lists(o, max_size=4) | st.dictionaries(keys, o, max_size=5), max_leaves=25)

@settings(max_examples=400, deadline=None, derandomize=True)
@given(anything)
def test_nothing_raises(value):
    for given_choice in (value, dict(message=value), dict(message=dict(content=value, tool_calls=value)), choice(call(value)), choice(value, value),
        said('', 'tool_use_failed') | dict(error=value), dict(message=dict(reasoning_details=value, content=[value], function_call=value), finish_reason=value)):
        reply = read_reply(given_choice)
        assert (reply.verdict == 'ok') == bool(reply.actions) == (reply.problem is None)
        assert set(reply.actions) <= set(ACTIONS)
        valid_history(reply)

marks = sorted({o for k in WRITTEN for o in re.split(r'"\]?|\b(?:do|interact_many|actions)\b', WRITTEN[k](['do'])) if o}) + [*THOUGHTS, *THOUGHTS.values()]
pieces = st.lists(st.sampled_from([*marks, '"do"', '"sleep"', '"actions"', '"name"', '"interact_many"', 'interact_many', 'actions', '["do", "sleep"]', ARGS, TAGGED,
    '{', '}', '[', ']', ', ', ': ', '"', '\\"', "'", '\n', ' ', 'x']) | st.text(max_size=3), max_size=14).map(''.join)

@settings(max_examples=500, deadline=None, derandomize=True)
@given(pieces)
@example('[TOOL_CALLS]' * 50 + ARGS)
@example('<tool_call>{"name": "x", "arguments": {}, "parameters": {}, "actions": ["do"]}</tool_call>')
def test_no_rubble_of_the_formats_invents_a_plan(text):
    for given_choice in (said(text), choice(call(text)), choice(call(ARGS), call(text, id='c2')), said(text, 'tool_use_failed')):
        reply = read_reply(given_choice, max_actions=100)
        assert contained(json.dumps(given_choice, ensure_ascii=False), reply.actions)
        valid_history(reply)

actions = st.lists(st.sampled_from(ACTIONS), min_size=1, max_size=8)

@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions, st.data())
def test_no_prefix_of_a_call_is_executed(names, data):
    args = arguments(names)
    cut = lambda s: s[:data.draw(st.integers(0, len(s) - 1))]
    for given_choice in (choice(call(cut(args))), choice(call(cut(json.dumps(args)))), said(cut(args)), said('<tool_call>' + cut(named(names))),
        said('hm</think>' + cut(named(names))), choice(call(args), call(cut(args), id='c2'))):
        assert read_reply(given_choice).actions == ()

@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.lists(actions, min_size=1, max_size=3), st.sampled_from([*WRITTEN]), st.integers(0, 2000))
def test_several_calls_cut_anywhere_are_whole_calls_or_nothing(plan, kind, at):
    text = ''.join(map(WRITTEN[kind], plan))[:at]
    reply = read_reply(said(text), max_actions=100)
    if reply.verdict == 'ok':
        assert list(reply.actions) in [sum(plan[:k], []) for k in range(1, len(plan) + 1)] and contained(text, reply.actions)
    valid_history(reply)

@settings(max_examples=800, deadline=None, derandomize=True)
@given(actions, st.sampled_from([*WRITTEN]), st.integers(0, 300), st.integers(0, 40), st.text('[]{}",:\\\'<>/ ado\n', max_size=2))
def test_no_damage_to_a_reply_invents_a_plan(names, kind, at, lost, noise):
    "Some characters lost, others in their place: what is carried out stands in the text, whole"
    text = WRITTEN[kind](names)
    text = text[:at] + noise + text[at + lost:]
    reply = read_reply(said(text), max_actions=100)
    assert contained(text, reply.actions)
    if not lost and not noise: assert reply.actions == tuple(names)
    valid_history(reply)

@settings(max_examples=300, deadline=None, derandomize=True)
@given(actions, st.integers(0, 300), st.text(max_size=3))
def test_an_action_stands_in_the_text(names, at, noise):
    broken = named(names)[:at] + noise + named(names)[at + 1:]
    for given_choice in (said(broken), said(f'<tool_call>{broken}</tool_call>'), choice(call(broken))):
        assert all(o in broken for o in read_reply(given_choice).actions)

@pytest.mark.parametrize('text', ['<tool_call>' * 20_000, '[' * 100_000, '{"' * 50_000, ' ' * 100_000 + '{"', '<parameter=a>' * 8_000, 'a_' * 50_000 + '{"', '```' * 30_000,
    '<function=a><parameter=b>' * 4_000, '[a(b=' * 20_000, '<|' * 50_000, '[THINK]' * 20_000, '</think>' * 20_000, '\\"' * 50_000, '<function=' + 'a' * 90_000, "['" * 40_000])
def test_no_text_makes_reading_slow(text):
    "Work grows with the text, not with its square; a hang would show as a test that does not end"
    for given_choice in (said(text), choice(call(text)), said('<tool_call>' + text), said('<function=x>' + text + '</function>')):
        valid_history(read_reply(given_choice))
