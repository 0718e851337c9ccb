"""What a lesson on checks should not carry: other roads to the same numbers, corner cases, and traces that were tampered with"""
import json, random
from types import SimpleNamespace

import numpy as np, pandas as pd, pytest

from synth_lab import checks as c
from synth_lab.agent import Agent
from synth_lab.client import ServerError
from synth_lab.metrics import MetricsError
from synth_lab.rollout import rollout_sync
from synth_lab.traces import Store
from synth_lab.world import ACTIONS


class Dice:
    "Stands for a client and its model: throws dice, and every now and then slips, waits or fails"
    endpoint = SimpleNamespace(name='dice', in_process=True)
    def __init__(self, slips=0., fails=0.): self.slips,self.fails = slips,fails
    def cost(self, model, usage): return 0.
    async def post(self, payload):
        dice,luck = random.Random(payload['seed']),random.Random(-payload['seed'])
        arguments = json.dumps(dict(actions=dice.choices(ACTIONS, k=8)))
        if luck.random() < self.slips: arguments = luck.choice(['{"actions": ["jump"]}', '{"actions"', None])
        tries = [dict(http_status=503, error='overloaded', latency_ms=250., waited_s=0.)]*luck.choice([0, 0, 2])
        if luck.random() < self.fails:
            e = ServerError('down', status=503)
            e.attempts = [dict(http_status=503, error='down', latency_ms=100., waited_s=1.)]*3
            raise e
        call = dict(id='0', function=dict(name='interact_many', arguments=arguments))
        said = dict(role='assistant', content='dice', tool_calls=[call] if arguments else None)
        return dict(choices=[dict(finish_reason='tool_calls', message=said)]), tries + [dict(http_status=200, error=None, latency_ms=5., waited_s=.5*len(tries))]


@pytest.fixture(scope='module')
def store(tmp_path_factory):
    store = Store(tmp_path_factory.mktemp('checks')/'lab')
    for name,how in dict(good=(0, 0), bad=(.3, 0), down=(.1, .04)).items():
        rollout_sync(store, Dice(*how), Agent(name), range(6), run_id=name, max_turns=25, group_size=2, max_failures=None)
    return store


@pytest.fixture
def tables(store): return [store.sql(f'FROM {t} ORDER BY run_id, episode_id') for t in ('episodes', 'calls', 'steps')]


def test_the_error_budget_in_sql(store, tables):
    "The same counts by SQL, which reads the tries as JSON"
    ours = c.error_budget(*tables[:2])
    told = store.sql("""SELECT model, count(*) AS n, count(*) FILTER (verdict IS NULL) AS no_reply, count(verdict) AS replies,
            count(*) FILTER (verdict <> 'ok') AS unusable, count(*) FILTER (verdict = 'malformed') AS malformed, sum(attempts)::INT AS tries,
            sum(len(list_filter(tries::JSON[], lambda t: t->>'error' IS NOT NULL)))::INT AS failed_tries,
            sum(list_sum(list_transform(tries::JSON[], lambda t: (t->>'waited_s')::DOUBLE
                + CASE WHEN t->>'error' IS NULL THEN 0 ELSE (t->>'latency_ms')::DOUBLE/1000 END))) AS lost_s
        FROM calls GROUP BY ALL""").set_index('model').loc[ours.index]
    for k in ('n', 'no_reply', 'tries', 'failed_tries'): assert ours[('calls', k)].tolist() == told[k].tolist(), k
    assert np.allclose(ours.calls.lost_s, told.lost_s) and told.lost_s.min() > 0
    assert ours.replies.n.tolist() == told.replies.tolist()
    for k in ('unusable', 'malformed'): assert np.allclose(ours[('replies', k)], told[k]/told.replies)
    assert (ours.replies.unusable > 0).to_dict() == dict(good=False, bad=True, down=True)


def test_errors_of_failed_episodes_are_in_the_budget(store, tables):
    ours = c.error_budget(*tables[:2]).loc['down']
    failed = tables[0].query('run_id == "down" and status == "error"')
    assert ours.episodes.errors == len(failed) == ours.calls.no_reply > 0 and ours.episodes.planned == 12
    assert ours.score.mean_return == pytest.approx(tables[0].query('run_id == "down" and status == "done"')['return'].mean())


def test_a_group_has_its_own_calls_only(tables):
    episodes,calls,_ = tables
    one = c.error_budget(episodes.query('run_id == "bad"'), calls).loc['bad']
    pd.testing.assert_series_equal(one, c.error_budget(episodes, calls).loc['bad'])
    by = c.error_budget(episodes, calls, by=['model', 'seed'])
    assert by[('calls', 'n')].sum() == len(calls) and by.index.names == ['model', 'seed']


def test_a_group_without_calls_has_no_shares():
    episodes = pd.DataFrame(dict(run_id='r', episode_id=['r:0:0'], attempt=1, model='a', status='planned', n_achievements=None, **{'return': None}))
    calls = pd.DataFrame(dict(run_id=[], episode_id=[], attempt=[], verdict=[], tries=[]))
    row = c.error_budget(episodes, calls).loc['a']
    assert row.calls.n == row.replies.n == row.calls.lost_s == 0 and row.replies.drop('n').isna().all()


def test_a_cached_reply_has_no_tries_and_a_later_attempt_counts():
    episodes = pd.DataFrame(dict(run_id='r', episode_id=['r:0:0'], attempt=3, model='a', status='done', n_achievements=1, **{'return': 1.}))
    calls = pd.DataFrame(dict(run_id='r', episode_id='r:0:0', attempt=[3, 3, 1], verdict='ok', tries=[None, '[]', '[{"error": "x", "latency_ms": null}]']))
    row = c.error_budget(episodes, calls).loc['a']
    assert (row.calls.n, row.calls.tries, row.calls.lost_s, row.episodes.begun_again) == (2, 0, 0, 2)


def test_columns_that_are_not_there_are_named(tables):
    episodes,calls,steps = tables
    with pytest.raises(MetricsError, match='calls have no column `tries`'): c.error_budget(episodes, calls.drop(columns='tries'))
    with pytest.raises(MetricsError, match='no column `modle`'): c.error_budget(episodes, calls, by='modle')
    with pytest.raises(MetricsError, match='steps have no column `effect`'): c.diff(*two(tables), steps.drop(columns='effect'))
    with pytest.raises(MetricsError, match='steps have no column `health`'): c.reward_identity(episodes, steps.drop(columns='health'))


def two(tables, a='good:0:0', b='good:0:1'):
    row = tables[0].set_index('episode_id', drop=False).loc
    return row[a], row[b]


def test_the_first_difference_is_where_sql_finds_it(store, tables):
    for a, b in (('good:0:0', 'good:0:1'), ('good:1:0', 'bad:1:0'), ('bad:2:1', 'down:2:1')):
        got = c.diff(*two(tables, a, b), tables[2])
        first = store.rows('SELECT min(x.step) AS n FROM steps x JOIN steps y USING (step) WHERE x.episode_id = ? AND y.episode_id = ? AND x."action" <> y."action"', a, b)[0]['n']
        assert (got.step, got.kind, got.shared['steps']) == (first, 'decision', first-1)
        before = store.rows('SELECT coalesce(sum(reward), 0) AS r FROM steps WHERE episode_id = ? AND step < ?', a, first)[0]['r']
        assert got.shared['reward'] == pytest.approx(before)
        assert got.at.loc['action', a] != got.at.loc['action', b] and f'part at step {first}:' in repr(got)


def test_the_same_episode_has_no_difference(tables):
    a, _ = two(tables)
    got = c.diff(a, a, tables[2])
    assert (got.step, got.kind, got.seen) == (None, None, '') and repr(got) == got._repr_markdown_() and 'the same in all' in repr(got)


def test_an_episode_that_goes_on_differs_at_its_next_step(tables):
    a, _ = two(tables)
    b, mine = a.copy(), tables[2][tables[2].episode_id == a.episode_id]
    b['episode_id'] = 'shorter'
    got = c.diff(a, b, pd.concat([mine, mine[mine.step <= 5].assign(episode_id='shorter')]), observe=lambda e, n: 'never asked')
    assert (got.step, got.kind, got.seen) == (6, 'end', '') and set(got.at['shorter']) == {'–'} and got.ends.shape[1] == 2


@pytest.mark.parametrize('column, value', [('reward', 7.), ('effect', 'flew'), ('health', 1), ('unlocked', np.array(['eat_cow'])), ('terminated', True)])
def test_the_same_action_with_another_outcome_is_another_world(tables, column, value):
    a, _ = two(tables)
    b, mine = a.copy(), tables[2][tables[2].episode_id == a.episode_id].sort_values('step')
    b['episode_id'], other = 'other', mine.assign(episode_id='other').reset_index(drop=True)
    other[column] = [value if n == 3 else o for n,o in enumerate(other[column])]
    got = c.diff(a, b, pd.concat([mine, other]), observe=lambda e, n: f'same\nsaw {e.episode_id} {n}')
    assert (got.step, got.kind) == (4, 'world') and 'not the same worlds' in repr(got)
    assert got.seen == f'saw {a.episode_id} 4   saw other 4'


def test_long_lines_go_on_below_and_nothing_is_cut(tables):
    saw = lambda e, n: 'the same\n' + ' '.join([e.episode_id]*20) + f'\nlast of {e.episode_id}'
    a, b = two(tables)
    lines = c.diff(a, b, tables[2], saw).seen.splitlines()
    assert len(lines) == 5 and ' '.join(lines).split().count(a.episode_id) == ' '.join(lines).split().count(b.episode_id) == 21
    assert max(map(len, lines)) <= 2*56 + 3 and lines[-1].endswith(f'   last of {b.episode_id}')


def test_unknown_values_are_not_a_difference(tables):
    "An imported trace may not know the health of its steps"
    a, b = two(tables)
    got = c.diff(a, b, tables[2].assign(health=None, effect=np.nan))
    assert got.kind == 'decision'


def test_attempts_are_not_mixed(tables):
    a, b = two(tables)
    older = tables[2][tables[2].episode_id == a.episode_id].assign(attempt=0, action='noop')
    assert c.diff(a, b, pd.concat([older, tables[2]])).step == c.diff(a, b, tables[2]).step


@pytest.mark.parametrize('change', [dict(seed=1), dict(difficulty='easy'), dict(rng='crafter-64'), dict(length=1000)])
def test_episodes_of_different_worlds_are_refused(tables, change):
    a, b = two(tables)
    b = b.copy()
    for k,v in change.items(): b[k] = v
    with pytest.raises(MetricsError, match=f'`{next(iter(change))}` is'): c.diff(a, b, tables[2])


def test_a_long_thought_is_cut_and_says_so(tables):
    got = c.diff(*two(tables), tables[2].assign(thought='a | b\n' + 'x'*1000))
    text = got._repr_markdown_()
    assert '… (706 more characters)' in text and 'a \\| b x' in text and len(text) < 4000


def test_rewards_add_up_in_sql(store, tables):
    "The identity by SQL, over whole episodes, and by `reward_identity`, step by step"
    off = store.rows("""SELECT count(*) AS n FROM (SELECT sum(reward) - count(*) FILTER (len(unlocked) > 0) - (arg_max(health, step) - 9)/10 AS off
        FROM steps GROUP BY episode_id) WHERE abs(off) > 1e-6""")[0]['n']
    got = c.reward_identity(tables[0], tables[2])
    assert off == 0 and got.ok and (got.episodes, got.steps) == (36, len(tables[2])) and 'every reward is accounted for' in repr(got)
    assert tables[2].health.min() < 9, 'no health was lost: the test shows nothing'


def tampered(tables, change):
    e, s = tables[0].copy(), tables[2].sort_values(['episode_id', 'step']).reset_index(drop=True)
    e, s = change(e, s) or (e, s)
    return c.reward_identity(e, s).broken


def test_a_reward_that_is_off_is_found_where_it_is(tables):
    def change(e, s): s.loc[(s.episode_id == 'good:2:0') & (s.step == 9), 'reward'] += .1
    broken = tampered(tables, change)
    assert broken.episode_id.tolist() == ['good:2:0'] and broken.problem[0].startswith('step 9 paid 0.1, not 0; its return is')
    assert broken.reward[0] - broken.due[0] == pytest.approx(.1)


def test_two_wrongs_that_cancel_are_found(tables):
    def change(e, s):
        s.loc[(s.episode_id == 'good:2:0') & (s.step == 9), 'reward'] += .1
        s.loc[(s.episode_id == 'good:2:0') & (s.step == 11), 'reward'] -= .1
    assert tampered(tables, change).problem.tolist() == ['step 9 paid 0.1, not 0']


def test_steps_that_are_lost_doubled_or_all_gone(tables):
    at = lambda s, id_, n: s.index[(s.episode_id == id_) & (s.step == n)]
    lost = tampered(tables, lambda e, s: (e, s.drop(at(s, 'bad:1:0', 3))))
    assert lost.episode_id.tolist() == ['bad:1:0'] and 'of which' in lost.problem[0] and 'step 3 is missing' in lost.problem[0]
    twice = tampered(tables, lambda e, s: (e, pd.concat([s, s.loc[at(s, 'bad:1:0', 3)]])))
    assert 'step 3 is there twice' in twice.problem[0]
    gone = tampered(tables, lambda e, s: (e, s[s.episode_id != 'bad:1:0']))
    assert gone.episode_id.tolist() == ['bad:1:0'] and 'of which 0 are there' in gone.problem[0]


def test_totals_that_are_not_those_of_the_steps(tables):
    def change(e, s):
        e.loc[e.episode_id == 'good:0:0', 'return'] += 1
        e.loc[e.episode_id == 'good:0:1', 'achievements'] = e.achievements[e.episode_id == 'good:0:1'].map(lambda o: [*o, 'eat_cow'])
    broken = tampered(tables, change).set_index('episode_id').problem
    assert broken['good:0:0'].startswith('its return is') and 'achievements, its steps unlocked' in broken['good:0:1'] and len(broken) == 2


def test_what_is_unknown_is_not_accounted_for(tables):
    def change(e, s): s['health'] = s.health.mask((s.episode_id == 'good:2:0') & (s.step == 9))
    assert tampered(tables, change).problem.tolist() == ['the reward or the health of step 9 is unknown']


def test_the_list_of_broken_episodes_says_what_it_leaves_out(tables):
    text = repr(c.reward_identity(tables[0], tables[2].assign(reward=9.)))
    assert '36 episodes do not add up (showing 20)' in text and text.count('- `') == 20


def test_two_unlocks_in_one_step_pay_once():
    steps = pd.DataFrame(dict(run_id='r', episode_id='e', attempt=1, step=[1, 2, 3], reward=[1., .9, -.2], unlocked=[['a', 'b'], ['c'], []], health=[9, 8, 6]))
    episodes = pd.DataFrame(dict(run_id='r', episode_id=['e'], attempt=1, steps=3, achievements=[['a', 'b', 'c']], **{'return': 1.7}))
    assert c.reward_identity(episodes, steps).ok
    assert not c.reward_identity(episodes, steps, health=8).ok


def test_a_planned_episode_has_nothing_to_add_up():
    episodes = pd.DataFrame(dict(run_id='r', episode_id=['e'], attempt=1, steps=0, achievements=[[]], **{'return': None}))
    steps = pd.DataFrame(dict(run_id='r', episode_id=['x'], attempt=1, step=1, reward=[0.], unlocked=[[]], health=9))
    assert c.reward_identity(episodes, steps).ok
    assert c.reward_identity(episodes, steps.iloc[:0]).ok
