"""What a lesson on filters should not carry: every rule, every fault of a file, crashes, planted secrets."""
import copy, json, os

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from synth_lab import filters as f
from synth_lab.filters import Filter, FilterError
from synth_lab.rows import RowError, row_problems, validate
from synth_lab.tools import interact_many
from synth_lab.traces import Store

CONFIG = dict(model='expert', endpoint='local', split='train', difficulty='normal', rng='pure', length=200)
SYSTEM, USER = dict(role='system', content='You play Crafter.'), dict(role='user', content='step 0/200')
CALL = dict(id='call_0', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))
ANSWER = dict(role='assistant', content='', tool_calls=[CALL])
TURN = dict(prompt=[SYSTEM, USER], tools=[interact_many(8)], output=ANSWER, verdict='ok', thought='A tree.', actions=['do'])


def add_run(store, run_id, episodes, **config):
    "Write a run; an episode is a dict of `episode_end` fields and `turns_`, a list of changes to `TURN`"
    ids = [f'{run_id}:{s}:0' for s in range(len(episodes))]
    with store.run(run_id, CONFIG | config, [dict(episode_id=i, seed=s, sample=0) for s,i in enumerate(ids)]) as w:
        for i,e in zip(ids, episodes):
            who, e = dict(episode_id=i, attempt=1), dict(e)
            w.write('episode', **who, started_at='2026-01-31T12:00:00.000Z')
            for n,change in enumerate(e.pop('turns_', [{}]), 1): w.call(**TURN | change, **who, turn=n, call_id=f'{i}:{n}')
            w.write('episode_end', **who, **dict(status='done', achievements=[], ended_at='2026-01-31T12:01:00.000Z', **{'return': 0.}) | e)


@pytest.fixture
def store(tmp_path):
    s = Store(tmp_path/'lab')
    wood, table = ['collect_wood'], ['collect_wood', 'place_table']
    add_run(s, 'one', [{'return': .1}, {'achievements': wood, 'return': .9}, {'achievements': table, 'return': 2.}])
    add_run(s, 'two', [{'achievements': [*table, 'eat_cow'], 'return': 1.5}, {'achievements': ['eat_cow'], 'return': 1.}], model='random', split='eval')
    return s


def kept(store, **rules): return Filter(**rules).select(store).episodes.episode_id.str.removesuffix(':0').tolist()


@pytest.mark.parametrize('rules, ids', [
    ({}, ['one:0', 'one:1', 'one:2', 'two:0', 'two:1']),
    (dict(runs='two'), ['two:0', 'two:1']),
    (dict(models=('expert', 'random'), splits='train'), ['one:0', 'one:1', 'one:2']),
    (dict(seeds=np.arange(1, 99)), ['one:1', 'one:2', 'two:1']),
    (dict(min_achievements=2), ['one:2', 'two:0']),
    (dict(min_achievements=1, max_achievements=1), ['one:1', 'two:1']),
    (dict(min_return=.9), ['one:1', 'one:2', 'two:0', 'two:1']),
    (dict(max_return=.9), ['one:0', 'one:1']),
    (dict(require_all=['place_table', 'collect_wood']), ['one:2', 'two:0']),
    (dict(require_any=['place_table', 'eat_cow']), ['one:2', 'two:0', 'two:1']),
    (dict(require_any='eat_cow', max_return=1.2), ['two:1'])])
def test_each_rule_keeps_what_it_says(store, rules, ids): assert kept(store, **rules) == ids


@pytest.mark.parametrize('status', ['error', 'timeout', 'cancelled', 'truncated'])
def test_what_was_not_played_to_its_end_never_enters(store, status, tmp_path):
    add_run(store, 'bad', [{'status': status, 'achievements': ['collect_wood']*2, 'return': 9.}])
    s = Filter(min_return=.5).select(store)
    first = s.explain().table.iloc[0]
    assert (first.before, first.removed, first.after, first['removed were']) == (6, 1, 5, f'1 {status}')
    assert 'bad' not in s.episodes.run_id.tolist() and s.write(tmp_path/'d.jsonl').rows == 4


def test_planned_and_running_episodes_are_counted_too(store):
    store.run('later', CONFIG, [dict(episode_id='later:0:0', seed=0, sample=0)]).close()
    assert Filter().select(store).explain().table.iloc[0]['removed were'] == '1 planned'


def test_explanation_adds_up(store, tmp_path):
    add_run(store, 'three', [{'achievements': ['eat_cow'], 'return': 1.2, 'turns_': [{}, dict(verdict='malformed'), dict(verdict=None, output=None), {}]}])
    s = Filter(min_return=1, require_any='eat_cow', runs=('two', 'three')).select(store)
    t = s.explain().table
    assert t.rule.tolist() == ['finished', 'runs', 'min_return', 'require_any', 'usable']
    assert ((t.before - t.removed) == t.after).all() and t.before.tolist()[1:4] == t.after.tolist()[:3]
    assert t.iloc[-1]['removed were'] in ('1 malformed, 1 no reply', '1 no reply, 1 malformed')
    assert s.write(tmp_path/'d.jsonl').rows == t.after.iloc[-1] == s.turns == 4
    assert s.explain().means.loc['after', 'return'] == pytest.approx((1.5 + 1 + 1.2)/3)


@pytest.mark.parametrize('rules, says', [
    (dict(min_achievments=1), 'no rule `min_achievments`.*`min_achievements`'),
    (dict(require_all=['collect_wood', 'colect_coal']), 'no achievement `colect_coal`.*`collect_coal`'),
    (dict(require_any='diamond'), 'no achievement `diamond`'),
    (dict(models=()), '`models` is empty'),
    (dict(min_return='high'), "min_return='high'.*valid number"),
    (dict(seeds=3.5), 'seeds'), (dict(seeds='abc'), 'seeds'), (dict(models=7), 'models')])
def test_rules_that_cannot_be_meant(rules, says):
    with pytest.raises(FilterError, match=says): Filter(**rules)


@pytest.mark.parametrize('rules, says', [
    (dict(models='exprt'), 'of model `exprt`.*`expert`'), (dict(runs=['one', 'tow']), 'of run `tow`.*`two`'), (dict(splits='test'), 'of split `test`')])
def test_names_the_lab_does_not_have(store, rules, says):
    with pytest.raises(FilterError, match=says): Filter(**rules).select(store)


def test_a_rule_on_a_field_that_no_episode_has(tmp_path):
    s = Store(tmp_path/'lab')
    add_run(s, 'one', [{}], split=None)
    with pytest.raises(FilterError, match='`splits` looks at `split`, which no finished episode'): Filter(splits='train').select(s)
    with pytest.raises(FilterError, match='the lab has no episodes'): Filter().select(Store(tmp_path/'new'))


@pytest.mark.parametrize('rules, says', [(dict(min_achievements=20), '`min_achievements` .* removed the last 5'), (dict(seeds=[99]), '`seeds`')])
def test_nothing_kept_is_an_error_and_leaves_an_older_file_alone(store, tmp_path, rules, says):
    Filter().select(store).write(tmp_path/'d.jsonl')
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()}
    with pytest.raises(FilterError, match=says): Filter(**rules).select(store).write(tmp_path/'d.jsonl')
    with pytest.raises(FilterError, match=says): Filter(**rules).select(store).write(tmp_path/'new.jsonl')
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.is_file()} == before


def test_only_failures_or_only_unusable_replies_is_nothing_too(tmp_path):
    s = Store(tmp_path/'lab')
    add_run(s, 'one', [{'status': 'error'}])
    with pytest.raises(FilterError, match='`finished` .* removed the last 1'): Filter().select(s).write(tmp_path/'d.jsonl')
    add_run(s, 'two', [{'turns_': [dict(verdict='no_call')]}])
    with pytest.raises(FilterError, match='`usable` .* removed the last 1'): Filter().select(s).write(tmp_path/'d.jsonl')
    assert not list(tmp_path.glob('d.*'))


def test_the_row_exactly(store):
    assert next(Filter().select(store).rows()) == dict(
        messages=[dict(role='system', content='You play Crafter.'), dict(role='user', content='step 0/200'),
            dict(role='assistant', content='A tree.', tool_calls=[dict(id='call_0', type='function', function=dict(name='interact_many', arguments='{"actions": ["do"]}'))])],
        tools=[interact_many(8)])


def test_without_thoughts_the_answer_only_acts(store):
    assert next(Filter().select(store).rows(thoughts=False))['messages'][-1] == dict(role='assistant', tool_calls=[CALL])


def test_earlier_answers_are_context_not_targets(store):
    early = [SYSTEM, USER, ANSWER | dict(content='I go.'), dict(role='tool', tool_call_id='call_0', content='Done: do.'), USER]
    empty = [SYSTEM, USER, dict(role='assistant', content=''), USER]
    add_run(store, 'three', [{'turns_': [dict(prompt=early), dict(prompt=empty)]}])
    one, two = Filter(runs='three').select(store).rows()
    assert [m.get('weight') for m in one['messages']] == [None, None, 0, None, None, None]
    assert not row_problems(json.dumps(one).encode()) and not row_problems(json.dumps(two).encode())


def test_planted_secrets_stay_out(store, tmp_path, monkeypatch):
    "Also from traces that were written before the variable was set"
    own, key = 'hunter"2\\hunter2', 'sk-' + 'a1B2'*6
    args = json.dumps(dict(actions=['do'], note=f'{key} {own}'))
    leaky = dict(prompt=[dict(role='system', content=f'Authorization: Bearer {key}'), dict(role='user', content=f'use {own} "now"')], thought=f'my key is {key}',
        output=dict(role='assistant', content='', tool_calls=[CALL | dict(function=dict(name='interact_many', arguments=args))]))
    add_run(store, 'leak', [{'turns_': [leaky]}])
    monkeypatch.setenv('SOME_API_KEY', own)
    d = Filter(runs='leak').select(store).write(tmp_path/'d.jsonl')
    written = d.path.read_text() + f.card_path(d.path).read_text()
    assert key not in written and 'hunter' not in written and written.count('[redacted]') == 5
    assert validate(d.path).ok
    (tmp_path/'raw.jsonl').write_text(json.dumps(dict(messages=[dict(role='user', content=key), dict(role='assistant', content='ok')])))
    assert [p.reason for p in validate(tmp_path/'raw.jsonl').problems] == ['holds what looks like a secret key']


def test_two_writes_are_the_same_bytes_and_the_card_knows_them(store, tmp_path):
    import hashlib
    s = Filter(min_achievements=1).select(store)
    a, b = s.write(tmp_path/'a.jsonl'), s.write(tmp_path/'deep'/'b.jsonl')
    assert a.path.read_bytes() == b.path.read_bytes()
    card = json.loads((tmp_path/'a.card.json').read_bytes())
    assert card['sha256'] == hashlib.sha256(a.path.read_bytes()).hexdigest() and card['bytes'] == a.path.stat().st_size
    assert (card['rows'], card['episodes'], card['seeds'], card['filter']) == (4, 4, [0, 1, 2], dict(min_achievements=1))
    assert [(o['run_id'], o['model'], o['split'], o['episodes']) for o in card['sources']] == [('one', 'expert', 'train', 2), ('two', 'random', 'eval', 2)]


def test_a_crash_while_writing_leaves_the_old_file_and_no_litter(store, tmp_path, monkeypatch):
    s = Filter().select(store)
    s.write(tmp_path/'d.jsonl')
    before = (tmp_path/'d.jsonl').read_bytes()
    def fail(fd): raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'fsync', fail)
    with pytest.raises(FilterError, match="cannot be written: No space left on device"): Filter(min_achievements=2).select(store).write(tmp_path/"d.jsonl")
    assert (tmp_path/'d.jsonl').read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ['d.card.json', 'd.jsonl', 'lab']


def test_a_turn_that_would_be_a_faulty_row_stops_the_write(store, tmp_path):
    add_run(store, 'toolless', [{'turns_': [{}, dict(tools=None)]}])
    with pytest.raises(FilterError, match=r'turn 2 .*tool_calls\[0\].function.name: `interact_many` is not among the tools'):
        Filter(runs='toolless').select(store).write(tmp_path/'d.jsonl')
    assert not list(tmp_path.glob('d.*'))


def test_only_the_newest_attempt_enters(store):
    planned = [dict(episode_id='again:0:0', seed=0, sample=0)]
    with store.run('again', CONFIG, planned) as w:
        for attempt,thought in ((1, 'first'), (2, 'second')):
            who = dict(episode_id='again:0:0', attempt=attempt)
            w.write('episode', **who, started_at=f'2026-01-31T12:0{attempt}:00.000Z')
            w.call(**TURN | dict(thought=thought), **who, turn=1, call_id=f'c{attempt}')
            w.write('episode_end', **who, status='error' if attempt == 1 else 'done', ended_at=f'2026-01-31T12:0{attempt}:30.000Z', achievements=[], **{'return': 0.})
    assert [r['messages'][-1]['content'] for r in Filter(runs='again').select(store).rows()] == ['second']


def test_an_unknown_dialect_is_named(store, tmp_path):
    with pytest.raises(RowError, match='no dialect is called `opnai`.*`openai`'): Filter().select(store).write(tmp_path/'d.jsonl', dialect='opnai')


# The validator

GOOD = dict(messages=[SYSTEM, USER, ANSWER | dict(content='A tree.')], tools=[interact_many(8)])


def put(path, value):
    "A good row with `value` at `path`"
    row = spot = copy.deepcopy(GOOD)
    for k in path[:-1]: spot = spot[k]
    spot[path[-1]] = value
    return row


def said(*messages): return GOOD | dict(messages=list(messages))


FUN = ('messages', 2, 'tool_calls', 0, 'function')
TOOL = dict(role='tool', tool_call_id='call_0', content='ok')
FAULTS = [
    (said(SYSTEM, USER, ANSWER | dict(tool_calls=None, content='a'), dict(role='assistant', content='b')), 'messages[3]', 'assistant follows assistant'),
    (put(('tools',), ' '), 'tools', 'valid array'), (put(('tools',), []), 'tools', 'at least 1'), (put(('tools',), {}), 'tools', 'valid array'),
    (put(('tools', 0), dict(name='interact_many', parameters={})), 'tools[0].type', 'required'),
    (put(('messages', 2, 'weight'), .5), 'messages[2].weight', 'integer'), (put(('messages', 2, 'weight'), 2), 'messages[2].weight', 'less than or equal to 1'),
    (put(('messages', 2, 'weight'), True), 'messages[2].weight', 'integer'), (put(('messages', 1, 'weight'), 1), 'messages[1].weight', 'unknown key'),
    (put(('messages', 2, 'weight'), 0), 'messages', 'nothing to learn'),
    (put((*FUN, 'arguments'), dict(actions=['do'])), 'messages[2].tool_calls[0].function.arguments', 'valid string'),
    (put((*FUN, 'arguments'), '{"actions": ["do"'), 'messages[2].tool_calls[0].function.arguments', 'not JSON'),
    (put((*FUN, 'arguments'), json.dumps('{"actions": ["do"]}')), 'messages[2].tool_calls[0].function.arguments', 'JSON str, expected an object'),
    (put((*FUN, 'name'), 'interact_mny'), 'messages[2].tool_calls[0].function.name', 'not among the tools'),
    ({k: v for k,v in GOOD.items() if k != 'tools'}, 'messages[2].tool_calls[0].function.name', 'not among the tools'),
    (put(('messages', 2, 'tool_calls'), []), 'messages[2].tool_calls', 'at least 1'),
    (said(SYSTEM, USER), 'messages[1]', 'last message is of the user'),
    (said(USER, SYSTEM, ANSWER), 'messages[1]', 'system message after'), (said(SYSTEM, ANSWER), 'messages[1]', 'before any user'),
    (said(USER, ANSWER, USER, ANSWER), 'messages[2]', 'before the tool call `call_0` was answered'),
    (said(USER, ANSWER, TOOL | dict(tool_call_id='x'), ANSWER), 'messages[2]', 'answers `x`'), (said(USER, TOOL, ANSWER), 'messages[1]', 'no open tool call'),
    (said(USER, dict(role='assistant', content='')), 'messages[1]', 'says nothing'), (said(USER, dict(role='assistant')), 'messages[1]', 'says nothing'),
    (put(('messages', 1, 'content'), ' '), 'messages[1].content', 'expected text'), (put(('messages', 1, 'content'), None), 'messages[1].content', 'expected text'),
    (put(('messages', 1, 'role'), 'usr'), 'messages[1].role', 'does not match'), (put(('messages', 1), dict(content='hi')), 'messages[1].role', 'Unable to extract'),
    (put(('messages', 1), 'hi'), 'messages[1]', ''), (put(('messages',), []), 'messages', 'at least 1'), (dict(tools=GOOD['tools']), 'messages', 'required'),
    (dict(prompt='a', completion='b', **GOOD), 'prompt', 'unknown key'), ([GOOD], '', 'object')]


@pytest.mark.parametrize('row, path, reason', FAULTS)
def test_each_fault_is_named_with_its_place(row, path, reason):
    found = row_problems(json.dumps(row).encode(), 7)
    assert any(p.path == path and reason in p.reason and p.line == 7 and p.fix for p in found), found


@pytest.mark.parametrize('line, reason', [(b'{"messages": [', 'Invalid JSON'), (b'', 'blank line'), (b'\xff\xfe', 'Invalid JSON'), (b'\xef\xbb\xbf{"messages": []}', 'Invalid JSON')])
def test_lines_that_are_no_json(line, reason): assert reason in row_problems(line)[0].reason


PARALLEL = ANSWER | dict(tool_calls=[CALL, CALL | dict(id='call_1')])


@pytest.mark.parametrize('row', [GOOD, dict(messages=[USER, dict(role='assistant', content='Hi.')]),
    said(dict(role='developer', content='x'), USER, PARALLEL, TOOL, TOOL | dict(tool_call_id='call_1'), dict(role='assistant', content='Done.', weight=1)),
    said(USER, ANSWER | dict(weight=0), TOOL, USER, USER, ANSWER), GOOD | dict(parallel_tool_calls=False),
    said(dict(role='user', content=[dict(type='text', text='Look.'), dict(type='image_url', image_url=dict(url='data:image/png;base64,AA=='))]), ANSWER)])
def test_what_openai_documents_is_accepted(row): assert row_problems(json.dumps(row).encode()) == []


def test_a_report_counts_lines_and_shows_at_most_twenty(tmp_path):
    path = tmp_path/'d.jsonl'
    path.write_text('\n'.join([json.dumps(GOOD)] + ['{}']*30))
    r = validate(path)
    assert (r.rows, len(r.problems), r.problems[0].line, r.ok) == (31, 30, 2, False)
    assert 'showing 20 of 30' in r._repr_markdown_()
    path.write_text('')
    assert validate(path).problems[0].reason == 'the file is empty'
    with pytest.raises(RowError, match='is not a file'): validate(tmp_path/'none.jsonl')


json_values = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.sampled_from(['user', 'assistant', 'tool', 'function']),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.sampled_from(['role', 'content', 'messages', 'tools', 'tool_calls', 'weight', 'type', 'function', 'id']), v, max_size=4), max_leaves=12)


@settings(derandomize=True, deadline=None)
@given(json_values, json_values)
def test_the_validator_never_fails_itself(a, b):
    for row in (a, dict(messages=a), dict(messages=[USER, a, b]), said(USER, ANSWER | dict(content=a), dict(role='assistant', tool_calls=b))):
        assert all(p.reason and p.fix for p in row_problems(json.dumps(row).encode()))
