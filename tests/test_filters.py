"""What a lesson on filters should not carry: every rule, every fault of a file, crashes, planted secrets."""
import copy, json, os

import numpy as np, pytest
from hypothesis import given, settings, strategies as st

from synth_lab import filters as f, rows
from synth_lab.filters import Filter, FilterError
from synth_lab.rows import DIALECTS, RowError, from_synth, from_trl, row_problems, to_synth, to_trl, validate
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


def test_a_secret_among_turns_without_thoughts_stays_out(store, monkeypatch):
    add_run(store, 'mixed', [{'turns_': [dict(thought=None), dict(thought='the word is opensesame'), dict(thought=None, tools=[interact_many(8)])]}])
    monkeypatch.setenv('SOME_PASSWORD', 'opensesame')
    assert [r['messages'][-1].get('content') for r in Filter(runs='mixed').select(store).rows()] == [None, 'the word is [redacted]', None]


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


def test_a_full_disk_in_the_middle_leaves_the_old_files(long, tmp_path, monkeypatch):
    "Also of the file that was written first, and also when it is the thread that fails"
    s = Filter().select(long)
    s.write(tmp_path/'d.jsonl', val=.5)
    before = {p.name: p.read_bytes() for p in tmp_path.glob('d.*')}
    put = f._File._put
    def full(self, data):
        if self.path.name == 'd.val.jsonl': raise OSError(28, 'No space left on device')
        put(self, data)
    monkeypatch.setattr(f._File, '_put', full)
    with pytest.raises(FilterError, match='cannot be written: No space left'): Filter(shuffle=True).select(long).write(tmp_path/'d.jsonl', val=.5)
    assert {p.name: p.read_bytes() for p in tmp_path.glob('*d.*')} == before and len(before) == 4 and len(list(tmp_path.iterdir())) == 5


@pytest.mark.parametrize('path', ['folder', 'file/d.jsonl'])
def test_a_name_that_cannot_be_a_file(store, tmp_path, path):
    (tmp_path/'folder').mkdir(), (tmp_path/'file').write_text('')
    with pytest.raises(FilterError, match='cannot be written'): Filter().select(store).write(tmp_path/path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ['file', 'folder', 'lab']


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


# Rules that look further

@pytest.fixture
def wide(tmp_path):
    "Four episodes that differ in all that a rule can see; the last one has no price and no score"
    s = Store(tmp_path/'lab')
    ends = [dict(steps_played=n, cost_usd=c, turns=t, ended_by=b, started_at=f'2026-01-0{n//10}T00:00:00.000Z') for n,c,t,b in
        [(10, .1, 1, 'death'), (20, .2, 2, 'length'), (30, .3, 3, 'death'), (40, None, 4, 'length')]]
    add_run(s, 'w', [e | {'return': float(i), 'achievements': ['collect_wood']*i} for i,e in enumerate(ends)])
    s.label(['w:0:0', 'w:1:0'], quality='good', checked=True)
    s.label('w:2:0', quality='bad')
    scores = {'w:0:0': .1, 'w:1:0': .5, 'w:2:0': .9}
    s.score(lambda e: scores.get(e['episode_id']), 'style', 'judge-a')
    s.score(lambda e: .8 if e['episode_id'] in scores else None, 'style', 'judge-b')
    s.score(lambda e: float(e['steps']), 'length', 'judge-a')
    s.score(lambda e: .7 if e['episode_id'] in scores else None, 'achievements', 'judge-b') # named as a reward of the world's own
    return s


@pytest.mark.parametrize('rules, ids', [
    (dict(min_steps=20), 'w:1 w:2 w:3'), (dict(max_steps=20), 'w:0 w:1'), (dict(min_cost=.2), 'w:1 w:2'), (dict(max_cost=.25), 'w:0 w:1'),
    (dict(difficulty='normal'), 'w:0 w:1 w:2 w:3'), (dict(sql="ended_by = 'death'"), 'w:0 w:2'), (dict(sql='turns > 1 -- a remark'), 'w:1 w:2 w:3'),
    (dict(sql='turns = 1 OR turns = 4', min_steps=20), 'w:3'), (dict(sql='list_contains(achievements, \'collect_wood\')', max_return=2), 'w:1 w:2'),
    (dict(labels=dict(quality='good')), 'w:0 w:1'), (dict(labels=dict(quality='good', checked=True)), 'w:0 w:1'), (dict(labels=dict(quality='bad')), 'w:2'),
    (dict(min_judge_scores=dict(style=.5)), 'w:1 w:2'), (dict(max_judge_scores=dict(achievements=.7)), 'w:0 w:1 w:2'), (dict(max_judge_scores=dict(style=.8)), 'w:0 w:1'),
    (dict(min_judge_scores=dict(style=.5, length=25)), 'w:2'), (dict(max_judge_scores=dict(length=25), min_judge_scores=dict(style=.2)), 'w:1'),
    (dict(min_official_score=2), 'w:2 w:3'), (dict(max_official_score=1), 'w:0 w:1')])
def test_rules_that_look_further(wide, rules, ids): assert kept(wide, **rules) == ids.split()


@pytest.mark.parametrize('rules, n', [
    (dict(created_after='2026-01-31'), 5), (dict(created_after='2026-01-31T12:00:00.001Z'), 0), (dict(created_before='2026-01-31T12:00:00Z'), 5),
    (dict(created_before='2026-01-31T11:59'), 0), (dict(created_after='2026-01-31T14:00:00+02:00'), 5), (dict(created_after=1769860800), 5), (dict(min_created_at=1769860801), 0)])
def test_time_is_utc_and_both_ends_count(store, rules, n): assert len(kept(store, **rules)) == n


@pytest.mark.parametrize('rules, says', [
    (dict(min_judge_scores=dict(styl=.5)), 'with `styl`.*`style`'), (dict(min_judge_scores={'return':1}), 'with `return`'), (dict(labels=dict(qualty='good')), 'labelled `qualty = …`.*`quality`'),
    (dict(sql='turn > 3'), 'condition over the columns'), (dict(sql='turns >'), 'sql='), (dict(sql='error_type = 1 OR error_type IS NULL AND NULL'), 'a condition of your own.*no finished'),
    (dict(difficulty='hard'), 'difficulty `hard`.*`normal`'), (dict(created_after='soon'), 'created_after'), (dict(min_cost=2, max_cost=1), 'swap them'),
    (dict(created_after='2026-02-01', created_before='2026-01-01'), 'swap them'), (dict(min_judge_scores=dict(style=1), max_judge_scores=dict(style=0)), 'swap them'),
    (dict(min_judge_scores={}), 'empty'), (dict(labels={}), 'empty'), (dict(labels='good'), 'dictionary'), (dict(labels=dict(a=[1])), 'label cannot be'), (dict(sql=''), 'sql'),
    (dict(window=3), "granularity='window'"), (dict(window=0, granularity='window'), 'greater than or equal to 1'), (dict(granularity='step'), "'turn', 'window' or 'episode'"),
    (dict(balance=dict(model=3)), 'balance'), (dict(balance=dict(seed=0)), 'balance'), (dict(limit=0), 'limit'), (dict(offset=-1), 'offset'),
    (dict(db='a.db'), 'what `select` gets'), (dict(output='a.jsonl'), 'what `write` gets'), (dict(task_ids=['a']), '`seeds`, `splits`'), (dict(shuffle_seed=1, seed=2), 'the same rule'),
    (dict(min_turn_reward=1), 'no turn of these episodes has'), (dict(limits=3), 'did you mean `limit`')])
def test_what_cannot_be_meant_is_named(wide, rules, says):
    with pytest.raises(Exception, match=says) as e: Filter(**rules).select(wide)
    assert type(e.value).__name__ in ('FilterError', 'StoreError') and e.value.fix


def test_an_unknown_cost_is_not_a_small_one(wide):
    t = Filter(max_cost=9).select(wide).explain().table
    assert t[t.rule == 'max_cost'].removed.item() == 1


def test_a_rule_on_what_no_finished_episode_has(store):
    with pytest.raises(FilterError, match='`max_cost` looks at `cost_usd`, which no finished'): Filter(max_cost=1).select(store)
    with pytest.raises(FilterError, match='`labels.quality` looks at the label `quality`, which no finished'): Filter(labels=dict(quality='good')).select(store)


# Rows

def seen(step): return dict(role='user', content=f'step {step}')


@pytest.fixture
def long(tmp_path):
    "Two episodes of 7 and 3 turns, the fourth turn of the first unusable; turns 2 and 5 unlock something"
    s = Store(tmp_path/'lab')
    def turn(n, **change):
        unlocked = {2: ['collect_wood'], 5: ['collect_wood', 'eat_cow']}.get(n, [])
        return dict(prompt=[SYSTEM, seen(n)], turn_reward=len(unlocked), thought=f'thought {n}',
            steps=[dict(step=n, action='do', effect='', reward=0., unlocked=unlocked, health=9, terminated=False, truncated=False)]) | change
    add_run(s, 'l', [{'turns_': [turn(n, **(dict(verdict='malformed') if n == 4 else {})) for n in range(1, 8)], 'return': 3.}, {'turns_': [turn(n) for n in range(1, 4)], 'return': 1.}])
    return s


def shapes(store, **rules):
    "Seed, and the user's messages of each row"
    s = Filter(**rules).select(store)
    return [(int(s.pieces.seed[i]), [m['content'][5:] for m in r['messages'] if m['role'] == 'user']) for i,r in zip(s.order, s.rows())]


@pytest.mark.parametrize('rules, rows', [
    (dict(), [(0, '1'), (0, '2'), (0, '3'), (0, '5'), (0, '6'), (0, '7'), (1, '1'), (1, '2'), (1, '3')]),
    (dict(granularity='window', window=4), [(0, '1235'), (0, '67'), (1, '123')]),
    (dict(granularity='window', window=2, offset=1, limit=3), [(0, '35'), (0, '67'), (1, '12')]),
    (dict(granularity='episode'), [(0, '123567'), (1, '123')]),
    (dict(min_turn_reward=1), [(0, '2'), (0, '5'), (1, '2')]), (dict(min_turn_reward=2), [(0, '5')]),
    (dict(granularity='window', window=3, min_turn_reward=2), [(0, '567')]),
    (dict(verdicts=['ok', 'malformed'], seeds=0, limit=4), [(0, '1'), (0, '2'), (0, '3'), (0, '4')]),
    (dict(dedupe=True), [(0, '1'), (0, '2'), (0, '3'), (0, '5'), (0, '6'), (0, '7')]),
    (dict(balance=dict(seed=2)), [(0, '1'), (0, '2'), (1, '1'), (1, '2')]),
    (dict(balance=dict(achievement=1), min_turn_reward=1), [(0, '2'), (0, '5')]),
    (dict(balance=dict(achievement=1, seed=1), min_turn_reward=1), [(0, '2')])])
def test_rows_are_cut_as_asked(long, rules, rows): assert shapes(long, **rules) == [(s, list(o)) for s,o in rows]


def test_a_row_of_several_turns_is_a_conversation(long):
    row = next(Filter(granularity='episode').select(long).rows())
    roles = ' '.join(m['role'] for m in row['messages'])
    assert roles == 'system user assistant' + ' tool user assistant'*5
    assert row['messages'][3] == dict(role='tool', tool_call_id='call_0', content='Done: do.')
    assert [m['content'] for m in row['messages'] if m['role'] == 'assistant'] == [f'thought {n}' for n in (1, 2, 3, 5, 6, 7)]
    assert not row_problems(json.dumps(row).encode()) and not any('weight' in m for m in row['messages'])


def test_shuffling_is_seeded_and_loses_nothing(long):
    plain,a,b,c = (shapes(long, **o) for o in ({}, dict(shuffle=True), dict(shuffle=True, shuffle_seed=0), dict(shuffle=True, seed=1)))
    assert a == b != c and sorted(a) == sorted(c) == sorted(plain) != a


@pytest.mark.parametrize('rules', [{}, dict(granularity='episode'), dict(granularity='window', window=2), dict(shuffle=True)])
@pytest.mark.parametrize('size', [1, 2, 5])
def test_batches_change_nothing(long, monkeypatch, rules, size):
    whole = list(Filter(**rules).select(long).rows())
    read,real = [],f.Selection._read
    monkeypatch.setattr(f, '_BATCH', size)
    monkeypatch.setattr(f.Selection, '_read', lambda self, order, keys: read.append(len(order)) or real(self, order, keys))
    assert list(Filter(**rules).select(long).rows()) == whole
    assert sum(read) == len(whole) and (len(read) == 1) == ('shuffle' in rules or len(whole) == 1)


def test_pages_of_a_shuffle_do_not_overlap(long):
    pages = [shapes(long, shuffle=True, offset=n, limit=3) for n in (0, 3, 6)]
    assert sorted(sum(pages, [])) == sorted(shapes(long))


def test_the_story_adds_up_over_rows(long, tmp_path):
    s = Filter(dedupe=True, balance=dict(seed=4), offset=1, limit=2).select(long)
    t = s.explain().table
    assert t.rule.tolist() == ['finished', 'usable', 'dedupe', 'balance.seed', 'offset', 'limit']
    assert t.removed.tolist() == [0, 1, 3, 2, 1, 1] and ((t.before - t.removed) == t.after).all()
    assert len(s) == s.write(tmp_path/'d.jsonl').rows == t.after.iloc[-1] == 2


def test_nothing_left_by_a_cut_names_the_cut(long, tmp_path):
    with pytest.raises(FilterError, match='`offset` .* removed the last 9'): Filter(offset=99).select(long).write(tmp_path/'d.jsonl')
    with pytest.raises(FilterError, match='`min_turn_reward` .* removed the last 9'): Filter(min_turn_reward=9).select(long).write(tmp_path/'d.jsonl')


def test_examples_and_histogram_say_what_went(store, tmp_path):
    add_run(store, 'bad', [{'status': 'error'}])
    e = Filter(min_return=.9, require_all='collect_wood').select(store).explain('return')
    assert e.examples['dropped by'].tolist() == ['', '', '', 'finished', 'min_return', 'require_all']
    assert [o.split(',')[0] for o in e.examples.example] == ['one:2:0', 'two:0:0', 'one:1:0', 'bad:0:0', 'one:0:0', 'two:1:0']
    assert e.examples['because'].tolist()[4:] == ['return 0.1', "achievements ['eat_cow']"]
    assert e.histogram.before.sum() == 5 and e.histogram.after.sum() == 3
    page = e._repr_markdown_()
    assert '`min_return`' not in page and '█' in page and '░' in page and 'A tree.' in page
    assert Filter().select(store).explain().histogram.to_dict() == dict(before={'0': 1, '1': 2, '2': 1, '3': 1}, after={'0': 1, '1': 2, '2': 1, '3': 1})
    with pytest.raises(FilterError, match='did you mean `return`'): Filter().select(store).explain('retrun')


@pytest.mark.parametrize('rules, by', [(dict(min_return=99), 'return'), (dict(seeds=99), 'steps'), (dict(), 'cost_usd'), (dict(offset=99), 'wall_s'), (dict(limit=1), 'turns')])
def test_nothing_kept_and_nothing_known_can_be_explained(store, rules, by):
    e = Filter(**rules).select(store).explain(by)
    assert len(e.examples) <= 6 and '| finished |' in e._repr_markdown_() and e.plot()


def test_a_lab_of_failures_can_be_explained(tmp_path):
    s = Store(tmp_path/'lab')
    add_run(s, 'bad', [{'status': 'error'}]*5)
    e = Filter().select(s).explain()
    assert e.examples['dropped by'].tolist() == ['finished']*3 and e.table.after.tolist() == [0, 0]


def test_the_figure_is_drawn(store):
    ax, = Filter(min_return=1).select(store).explain().plot().axes
    assert [p.get_height() for p in ax.patches] == [1, 2, 1, 1, 0, 1, 1, 1]


@pytest.mark.parametrize('share', [.01, .2, .5, .99])
def test_no_world_is_on_both_sides(tmp_path, share):
    s = Store(tmp_path/'lab')
    for run in ('a', 'b'): add_run(s, run, [{'turns_': [{}]*(i+1)} for i in range(10)])
    d = Filter(shuffle=True).select(s).write(tmp_path/'d.jsonl', val=share)
    val = json.loads((tmp_path/'d.val.card.json').read_bytes())
    assert not set(d.card['seeds']) & set(val['seeds']) and sorted(d.card['seeds'] + val['seeds']) == list(range(10))
    assert len(val['seeds']) == min(max(1, round(10*share)), 9) and d.rows + d.val.rows == 110
    assert validate(d.path).ok and validate(d.val.path).ok and d.val.path.name == 'd.val.jsonl' and 'held back' in repr(d)
    again = Filter(runs='a').select(s).write(tmp_path/'e.jsonl', val=share)
    assert again.val.card['seeds'] == val['seeds']


def test_one_world_cannot_be_divided(store, tmp_path):
    with pytest.raises(FilterError, match='all rows are of one world'): Filter(seeds=0).select(store).write(tmp_path/'d.jsonl', val=.1)
    with pytest.raises(FilterError, match='no share'): Filter().select(store).write(tmp_path/'d.jsonl', val=1)
    assert not list(tmp_path.glob('d.*'))


def test_tokens_are_counted_as_it_says(store, tmp_path):
    s = Filter(limit=2).select(store)
    t = s.write(tmp_path/'d.jsonl', tokenizer=str.split).card['tokens']
    assert (t['how'], t['answers']) == ('str.split', 2*3.) # `A tree.interact_many{"actions": ["do"]}` has two blanks
    c = s.write(tmp_path/'d.jsonl').card['tokens']
    assert c['how'] == 'characters/4' and c['answers'] == 2*len('A tree.interact_many{"actions": ["do"]}')/4 and c['row_max'] == (c['answers'] + c['prompt'])/2


def test_thoughts_of_history_become_what_was_said(store):
    early = [SYSTEM, USER, ANSWER | dict(reasoning_content='I go.'), dict(role='tool', tool_call_id='call_0', content='Done: do.'), USER]
    add_run(store, 'three', [{'turns_': [dict(prompt=early)]}])
    s = Filter(runs='three').select(store)
    assert next(s.rows())['messages'][2] == dict(role='assistant', content='I go.', tool_calls=[CALL], weight=0)
    assert next(s.rows(thoughts=False))['messages'][2] == dict(role='assistant', content='', tool_calls=[CALL], weight=0)


def test_pictures_come_back(store, tmp_path):
    import base64
    url = 'data:image/png;base64,' + base64.b64encode(b'\x89PNG rest').decode()
    part = dict(type='image_url', image_url=dict(url=url))
    add_run(store, 'seen', [{'turns_': [dict(prompt=[SYSTEM, dict(role='user', content=[part])])]}])
    s = Filter(runs='seen').select(store)
    assert next(s.rows())['messages'][1]['content'] == [part]
    assert validate(s.write(tmp_path/'d.jsonl').path).ok and url in (tmp_path/'d.jsonl').read_text()
    with pytest.raises(RowError, match='images in a column'): s.write(tmp_path/'e.jsonl', dialect='trl')


@pytest.mark.parametrize('dialect', DIALECTS)
def test_what_is_written_is_valid_and_leads_back(long, tmp_path, dialect):
    s = Filter(granularity='window', window=2).select(long)
    d = s.write(tmp_path/'d.jsonl', dialect=dialect)
    assert validate(d.path, dialect).ok and d.card['dialect'] == dialect
    assert [DIALECTS[dialect].back(json.loads(o)) for o in d.path.read_bytes().splitlines()] == list(s.rows())
    assert [json.loads(o) for o in d.path.read_bytes().splitlines()] == list(s.rows(dialect=dialect))


def published_faults(row):
    "OpenAI's published check of a chat fine-tuning file, by its own types and by the rules that its guide names"
    from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
    from pydantic import TypeAdapter, ValidationError
    messages,faults = row.get('messages'),set()
    if not messages: return {'missing_messages_list'}
    faults |= {'unknown_key' for k in row if k not in ('messages', 'tools', 'parallel_tool_calls')}
    for m in messages:
        if 'role' not in m or not ('content' in m or 'tool_calls' in m): faults.add('message_missing_key')
        if set(m) - {'role', 'content', 'name', 'tool_calls', 'tool_call_id', 'weight'}: faults.add('message_unrecognized_key')
        if m.get('role') not in ('system', 'user', 'assistant', 'tool', 'developer'): faults.add('unrecognized_role')
        if m.get('weight', 0) not in (0, 1) or 'weight' in m and m['role'] != 'assistant': faults.add('weight')
    if not any(m.get('role') == 'assistant' and m.get('weight') != 0 for m in messages): faults.add('example_missing_assistant_message')
    try:
        for m in messages: list(TypeAdapter(ChatCompletionMessageParam).validate_python({k: v for k,v in m.items() if k != 'weight'}).get('tool_calls') or ())
        TypeAdapter(list[ChatCompletionFunctionToolParam]).validate_python(row.get('tools', []))
    except ValidationError as e: faults.add(f'types: {e}')
    return faults


def test_openai_takes_our_rows(long, tmp_path):
    pytest.importorskip('openai')
    for rules in (dict(), dict(granularity='window'), dict(granularity='episode'), dict(verdicts=['ok', 'malformed'])):
        d = Filter(**rules).select(long).write(tmp_path/'d.jsonl')
        assert [published_faults(json.loads(o)) for o in d.path.read_bytes().splitlines()] == [set()]*d.rows
    assert published_faults(TRL) and published_faults(SYNTH) and published_faults(dict(messages=[USER]))


words = st.text(max_size=6) | st.sampled_from(['<think>a</think>b', '<think>a</think>', '</think>', '<think>', ' '])
json_objects = st.dictionaries(st.text(max_size=3), st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.lists(st.integers(0, 3), max_size=2), max_size=2)


@st.composite
def conversations(draw):
    "Rows as OpenAI takes them: some answers are context, those after them are to be learned"
    context,learned = draw(st.integers(0, 2)),draw(st.integers(1, 3))
    messages = [dict(role='system', content='x')] if draw(st.booleans()) else []
    for n in range(context+learned):
        weight = dict(weight=0) if n < context else {}
        calls = draw(st.lists(json_objects, max_size=2))
        said = draw(st.none() | words) if calls else draw(words.filter(bool))
        answer = dict(role='assistant') | ({} if said is None else dict(content=said)) | weight
        if calls: answer['tool_calls'] = [dict(id=f'c{n}{k}', type='function', function=dict(name='f', arguments=json.dumps(o))) for k,o in enumerate(calls)]
        messages += [dict(role='user', content='y'), answer, *(dict(role='tool', tool_call_id=f'c{n}{k}', content='z') for k in range(len(calls)) if n < context+learned-1)]
    row = dict(messages=messages, tools=[dict(type='function', function=dict(name='f', parameters=dict(type='object')))])
    return row | (dict(parallel_tool_calls=draw(st.booleans())) if draw(st.booleans()) else {})


@settings(derandomize=True, deadline=None)
@given(conversations())
def test_dialects_are_inverse_to_each_other(row):
    before = copy.deepcopy(row)
    assert row_problems(json.dumps(row).encode()) == []
    for name,d in DIALECTS.items():
        made = json.loads(json.dumps(d.row(row)))
        assert d.back(made) == row and d.row(d.back(made)) == made and row == before
        assert row_problems(json.dumps(made).encode(), dialect=name) == []


def test_what_synth_writes_leads_back():
    "Also rows that were not made from ours"
    for answer in (dict(reasoning='r', content='c'), dict(reasoning='r', tool_calls=[CALL]), dict(content='c'), dict(tool_calls=[CALL]), dict(reasoning='r')):
        row = dict(messages=[USER, dict(role='assistant', **answer)], tools=[dict(type='function', name='interact_many')])
        assert to_synth(from_synth(row)) == row and not row_problems(json.dumps(row).encode(), dialect='synth')
    assert from_synth(dict(messages=[USER], metadata=dict(seed=1))) == dict(messages=[USER])


@pytest.mark.parametrize('messages, says', [
    ([USER, dict(role='assistant', content='a', weight=0)], 'nothing to learn'),
    ([USER, dict(role='assistant', content='a'), USER, dict(role='assistant', content='b', weight=0), USER, dict(role='assistant', content='c')], r'messages\[3\] has weight 0'),
    ([dict(role='user', content=[dict(type='image_url', image_url=dict(url='https://x/y.png'))]), dict(role='assistant', content='a')], 'images')])
def test_what_trl_has_no_words_for_is_an_error(messages, says):
    with pytest.raises(RowError, match=says): to_trl(dict(messages=messages))


TRL = to_trl(dict(messages=[SYSTEM, USER, ANSWER | dict(weight=0), dict(role='tool', tool_call_id='call_0', content='ok'), USER, ANSWER | dict(content='A tree.')], tools=[interact_many(8)]))
SYNTH = to_synth(dict(messages=[SYSTEM, USER, ANSWER | dict(content='A tree.')], tools=[interact_many(8)]))


def changed(row, *path, value):
    "`row` with `value` at `path`"
    row = spot = copy.deepcopy(row)
    for k in path[:-1]: spot = spot[k]
    spot[path[-1]] = value
    return row


@pytest.mark.parametrize('dialect, row, path, reason', [
    ('trl', changed(TRL, 'completion', 0, 'tool_calls', 0, 'function', 'arguments', value='{}'), 'completion[0].tool_calls[0].function.arguments', 'an object'),
    ('trl', changed(TRL, 'completion', 0, 'tool_calls', 0, 'function', 'name', value='interact'), 'completion[0].tool_calls[0].function.name', 'not among the tools'),
    ('trl', changed(TRL, 'completion', value=[USER]), 'completion[0]', 'last message is of the user'),
    ('trl', changed(TRL, 'completion', value=[]), 'completion', 'at least 1'), ('trl', changed(TRL, 'prompt', value=[]), 'prompt', 'at least 1'),
    ('trl', changed(TRL, 'prompt', 2, 'weight', value=0), 'prompt[2].weight', 'unknown key'),
    ('trl', changed(TRL, 'prompt', 3, 'tool_call_id', value='x'), 'prompt[3]', 'no open tool call'),
    ('trl', changed(TRL, 'tools', value='[{"name": "f"}]'), 'tools', '0.type'), ('trl', changed(TRL, 'tools', value='[]'), 'tools', 'at least 1'), ('trl', changed(TRL, 'tools', value='x'), 'tools', 'no JSON list'),
    ('trl', dict(messages=[USER, ANSWER]), 'prompt', 'required'),
    ('synth', changed(SYNTH, 'tools', value=[interact_many(8)]), 'tools[0].name', 'required'),
    ('synth', changed(SYNTH, 'messages', 2, 'content', value='x'), 'messages[2].content', 'text beside tool calls'),
    ('synth', changed(SYNTH, 'messages', 2, 'tool_calls', 0, 'function', 'arguments', value={}), 'messages[2].tool_calls[0].function.arguments', 'valid string'),
    ('openai', SYNTH, 'messages[2].reasoning', 'unknown key'), ('openai', TRL, 'prompt', 'unknown key')])
def test_each_dialect_has_its_validator(dialect, row, path, reason):
    found = row_problems(json.dumps(row).encode(), 3, dialect)
    assert any(p.path == path and reason in p.reason and p.line == 3 and p.fix for p in found), found


def test_tools_may_be_a_list_for_trl():
    row = TRL | dict(tools=json.loads(TRL['tools']))
    assert not row_problems(json.dumps(row).encode(), dialect='trl') and from_trl(row) == from_trl(TRL)


def test_the_database_suspects_all_that_is_masked(monkeypatch):
    import duckdb
    monkeypatch.setenv('SOME_API_KEY', 'a b.c*[d]"e\\f\ng')
    keys = f.key_values()
    for text in ('sk-' + 'a'*12, 'my gsk_' + 'A1b2'*4, 'x\nhf_' + 'q'*20, 'Bearer abcdefgh.ijk', *keys, json.dumps(keys[-1])):
        assert f.redact(text, keys) != text
        assert duckdb.execute('SELECT regexp_matches(?, ?)', [text, f._suspects(keys)]).fetchall()[0][0], text


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


def quick(row):
    "What the writer asks of a row, in place of the validator"
    return rows.sound([rows.part(m, len) for m in row['messages']], rows.part(row['tools'], len) if 'tools' in row else None)


@pytest.mark.parametrize('row', [r for r,_,_ in FAULTS if isinstance(r, dict) and isinstance(r.get('messages'), list) and r['messages']])
def test_the_writer_sees_the_same_faults(row):
    if set(row) <= {'messages', 'tools'}: assert not quick(row)


@settings(derandomize=True, deadline=None)
@given(conversations(), st.data())
def test_the_writer_and_the_validator_agree(row, data):
    "Also about rows in which messages were lost, or changed places"
    del row['messages'][data.draw(st.integers(0, len(row['messages'])-1))]
    if row['messages']: assert quick(row) == (row_problems(json.dumps({k: v for k,v in row.items() if k != 'parallel_tool_calls'}).encode()) == [])


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
