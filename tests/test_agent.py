"What the lesson of the agent should not carry: servers whose bookkeeping is odd, though their replies are usable"
import asyncio, json

import orjson, pytest

from synth_lab.agent import Agent, turn
from synth_lab.client import AsyncInferenceClient

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
    (dict(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=dict(cached_tokens='all')), (3, 2)),
    (dict(prompt_tokens=3, completion_tokens=2, prompt_tokens_details=dict(cached_tokens=4)), (3, 2))])
def test_odd_usage_is_unknown_and_the_turn_goes_on(usage, counts):
    t = ask(usage=usage)
    assert (t.usage['prompt_tokens'], t.usage['completion_tokens'], t.cost) == (*counts, None)

def test_usage_that_is_whole(): assert ask(usage=dict(prompt_tokens=3, completion_tokens=2)).cost == 0.

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
