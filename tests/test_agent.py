"What the lesson of the agent should not carry: servers whose bookkeeping is odd, though their replies are usable"
import asyncio, json

import orjson, pytest

from synth_lab.agent import Agent, turn
from synth_lab.client import AsyncInferenceClient

CALL = dict(id='c', function=dict(name='interact_many', arguments=json.dumps(dict(actions=['move_left', 'do']))))
ENTRIES = [dict(token='move_left', logprob=-1.5), dict(token='do', logprob=-2)]

def ask(choice={}, **body):
    "One turn with a server that adds `choice` to its choice and `body` to its body"
    sent = body | dict(choices=[dict(finish_reason='tool_calls', message=dict(role='assistant', content='I go.', tool_calls=[CALL])) | choice])
    async def app(scope, receive, send):
        await send(dict(type='http.response.start', status=200, headers=[]))
        await send(dict(type='http.response.body', body=orjson.dumps(sent)))
    t = asyncio.run(turn(Agent('m'), AsyncInferenceClient(app=app), [], '(step 1)'))
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
