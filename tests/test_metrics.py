"""What a lesson on metrics should not carry: oracles, corner cases, and the same numbers by SQL."""
import numpy as np, pandas as pd, pytest
from scipy import stats

from synth_lab import metrics as m
from synth_lab.world import ACHIEVEMENTS


def rows(n, model='a', **kw):
    "`n` finished episodes that unlocked wood"
    base = dict(run_id='r', episode_id=[f'{model}{i}' for i in range(n)], model=model, seed=np.arange(n), difficulty='normal', rng='pure',
        length=200, status='done', achievements=[['collect_wood']]*n, n_achievements=1, steps=200, turns=20, calls=20, unusable=0,
        input_tokens=100, output_tokens=10, cost_usd=0.)
    return pd.DataFrame({**base, 'return': 1., **kw})


def test_episodes_not_steps_are_averaged():
    eps = rows(2, steps=[10, 2], n_achievements=[0, 1], achievements=[[], ['collect_wood']], **{'return': [0., 1.]})
    s = m.summary(eps).loc['a']
    assert (s.mean_return, s.mean_achievements, s.mean_steps) == (.5, .5, 6)
    assert m.success_rates(eps).loc[('a', 'collect_wood'), 'rate'] == .5


@pytest.mark.parametrize('status, column', [('error', 'errors'), ('timeout', 'errors'), ('cancelled', 'errors'), ('truncated', 'truncated'),
    ('planned', 'unfinished'), ('running', 'unfinished')])
def test_unfinished_episodes_change_no_mean_and_are_counted(status, column):
    eps = rows(5, n_achievements=[1, 2, 3, 4, 5])
    bad = rows(3, status=status, n_achievements=[0, 0, np.nan], achievements=[None, [], None], **{'return': np.nan})
    before, after = (m.summary(e).loc['a'] for e in (eps, pd.concat([eps, bad])))
    assert after[column] == 3 and after.planned == 8 and after.n == 5
    means = [c for c in before.index if c not in (column, 'planned')]
    pd.testing.assert_series_equal(before[means], after[means])


def test_a_model_that_never_finished_has_a_row_of_counts():
    s = m.summary(pd.concat([rows(2), rows(3, 'b', status='error', **{'return': np.nan})]))
    assert s.loc['b', ['planned', 'n', 'errors']].tolist() == [3, 0, 3]
    assert s.loc['b', ['mean_achievements', 'ci95_lo', 'crafter_score', 'score_hi', 'mean_return', 'unusable']].isna().all()
    assert m.success_rates(rows(3, status='error')).rate.isna().all()


def test_nullable_columns_as_duckdb_gives_them():
    eps = rows(3, status=['done', 'done', 'error'], n_achievements=pd.array([4, 6, None], 'Int64'), achievements=[np.array(['collect_wood']), np.array([]), None],
        **{'return': pd.array([3.9, 6.1, None], 'Float64')})
    assert m.summary(eps).loc['a', ['n', 'mean_achievements', 'mean_return']].tolist() == [2, 5, 5]


def test_one_cost_unknown_makes_the_sum_unknown_and_failures_are_paid_for():
    assert m.summary(rows(3, cost_usd=[.1, .2, .4], status=['done', 'done', 'error'])).loc['a', 'cost_usd'] == pytest.approx(.7)
    assert np.isnan(m.summary(rows(2, cost_usd=[.1, None])).loc['a', 'cost_usd'])
    assert m.summary(rows(2, cost_usd=[.1, None], calls=[5, 0], status=['done', 'planned'])).loc['a', 'cost_usd'] == .1


def test_unusable_is_a_share_of_replies_not_of_calls():
    assert m.summary(rows(2, turns=10, calls=[10, 30], unusable=[1, 4])).loc['a', 'unusable'] == .25


def test_one_episode_of_unknown_tokens_makes_their_mean_unknown():
    assert m.summary(rows(2)).loc['a', 'mean_tokens'] == 110
    assert np.isnan(m.summary(rows(2, input_tokens=pd.array([100, None], 'Int64'))).loc['a', 'mean_tokens'])
    assert m.summary(rows(2, input_tokens=[100, None], status=['done', 'error'])).loc['a', 'mean_tokens'] == 110


def test_t_interval_is_scipys():
    v = np.random.default_rng(0).gamma(2, size=17)
    lo, hi = stats.ttest_1samp(v, 0).confidence_interval()
    est = m.mean_ci(v)
    assert (est.lo, est.hi, est.n) == (pytest.approx(lo), pytest.approx(hi), 17)


def test_bootstrap_is_scipys_and_repeats():
    v = np.random.default_rng(0).gamma(2, size=40)
    ours, theirs = m.mean_ci(v, method='bootstrap'), stats.bootstrap((v,), np.mean, method='percentile', rng=0).confidence_interval
    assert np.allclose(ours.ci95, theirs, atol=.03)
    assert ours == m.mean_ci(v, method='bootstrap')


def test_copies_of_an_episode_add_no_confidence():
    v = np.random.default_rng(0).normal(size=12)
    once, eight = m.mean_ci(v), m.mean_ci(np.repeat(v, 8), np.repeat(np.arange(12), 8))
    assert np.allclose(once.ci95, eight.ci95) and eight.n == 96
    once, eight = (m.score_ci(e) for e in (rows(12, achievements=[list(ACHIEVEMENTS[:i]) for i in range(12)]),
        pd.concat(8*[rows(12, achievements=[list(ACHIEVEMENTS[:i]) for i in range(12)])])))
    assert np.allclose([once.value, *once.ci95], [eight.value, *eight.ci95])
    a, b = m.success_rates(rows(12)), m.success_rates(pd.concat(8*[rows(12)]))
    assert np.allclose(a.lo, b.lo) and (b.n == 96).all()


@pytest.mark.parametrize('values', [[3.], []])
def test_one_or_no_episode_has_no_interval(values):
    for method in ('t', 'bootstrap'): assert np.isnan(m.mean_ci(values, method=method).ci95).all()
    assert np.isnan(m.score_ci(rows(1)).ci95).all() and m.score_ci(rows(1)).value == pytest.approx(101**(1/22) - 1)


def test_score_by_hand():
    rates = dict.fromkeys(ACHIEVEMENTS, 0.) | dict(collect_wood=.9, place_table=.5, make_wood_pickaxe=.01)
    assert m.crafter_score(list(rates.values())) == pytest.approx((91*51*2)**(1/22) - 1)
    assert m.crafter_score(22*[.01]) == pytest.approx(1)  # one percent everywhere is a score of one


@pytest.mark.parametrize('rates, says', [([.5]*21, 'all 22'), ([50.]*22, 'divide percentages'), ([np.nan]*22, '0 to 1'), ([-.1]*22, '0 to 1')])
def test_a_score_of_something_else_is_refused(rates, says):
    with pytest.raises(m.MetricsError, match=says): m.crafter_score(rates)


def test_wilson_is_scipys():
    for k,n in ((0, 10), (3, 30), (30, 30)):
        ci = stats.binomtest(k, n).proportion_ci(method='wilson')
        assert np.allclose(m.wilson(k/n, n), (ci.low, ci.high))


def test_coverage_of_the_score_interval():
    "The jackknife holds the true score in about 95 of 100 evaluations, and the reported score lies inside its own interval"
    rng, rates = np.random.default_rng(0), np.linspace(.02, .9, 22)
    held = inside = 0
    for _ in range(300):
        hits = rng.random((30, 22)) < rates
        est = m.score_ci(rows(30, achievements=[[a for a,h in zip(ACHIEVEMENTS, r) if h] for r in hits]))
        held += est.lo <= m.crafter_score(rates) <= est.hi
        inside += est.lo <= est.value <= est.hi
    assert .91 <= held/300 <= .98 and inside == 300


def test_paired_uses_shared_seeds_and_averages_samples_first():
    a = rows(5, seed=[0, 0, 1, 2, 9], n_achievements=[4, 8, 5, 7, 22])
    b = rows(5, 'b', seed=[0, 1, 1, 2, 8], n_achievements=[3, 1, 3, 3, 0])
    d = np.array([6-3, 5-2, 7-3])
    got, want = m.paired(a, b), stats.ttest_1samp(d, 0)
    assert (got.n, got.diff, got.only_a, got.only_b) == (3, pytest.approx(d.mean()), 1, 1)
    assert got.p == pytest.approx(want.pvalue) and got.ci95 == pytest.approx(tuple(want.confidence_interval()))
    back = m.paired(b, a)
    assert (back.diff, back.p) == (pytest.approx(-got.diff), pytest.approx(got.p))


def test_paired_leaves_failed_episodes_out():
    b = rows(4, 'b', status=['done', 'done', 'done', 'error'], n_achievements=[0, 1, 0, np.nan])
    assert (m.paired(rows(4), b).n, m.paired(rows(4), b).only_a) == (3, 1)


def test_paired_at_the_edges():
    same = m.paired(rows(6), rows(6, 'b'))
    assert (same.diff, same.lo, same.hi, same.p) == (0, 0, 0, 1)
    always = m.paired(rows(6, n_achievements=2), rows(6, 'b'))
    assert (always.diff, always.p) == (1, 0)
    one = m.paired(rows(1), rows(1, 'b'))
    assert one.diff == 0 and np.isnan([one.lo, one.hi, one.p]).all()


@pytest.mark.parametrize('change, says', [(dict(length=1000), 'length'), (dict(rng='crafter-64'), 'rng'), (dict(seed=[90, 91, 92]), 'no seed in common'),
    (dict(status='error'), 'no seed in common'), (dict(model=['x', 'y', 'x']), 'several values of `model`')])
def test_paired_refuses_what_is_not_comparable(change, says):
    with pytest.raises(m.MetricsError, match=says): m.paired(rows(3), rows(3, 'b').assign(**change))


def test_missing_columns_and_rows_are_named():
    with pytest.raises(m.MetricsError, match='no column `modle`.*`model`'): m.summary(rows(2), by='modle')
    with pytest.raises(m.MetricsError, match='no column `seed`'): m.success_rates(rows(2).drop(columns='seed'))
    with pytest.raises(m.MetricsError, match='no episodes'): m.summary(rows(2).iloc[:0])
    with pytest.raises(m.MetricsError, match='unknown status.*finished'): m.tally(rows(2, status='finished'))
    with pytest.raises(m.MetricsError, match='did you mean `bootstrap`'): m.mean_ci([1, 2], method='bootstrp')


def test_groups_by_several_columns():
    s = m.summary(pd.concat([rows(2), rows(3, run_id='s')]), by=['model', 'run_id'])
    assert s.n.to_dict() == {('a', 'r'): 2, ('a', 's'): 3}


def test_effect_is_the_mean_over_the_deviation_of_the_differences():
    a, b = rows(4, n_achievements=[3, 5, 4, 8]), rows(4, 'b', n_achievements=[2, 5, 1, 2])
    d = np.array([1, 0, 3, 6])
    got = m.paired(a, b)
    assert (got.sd, got.effect) == (pytest.approx(d.std(ddof=1)), pytest.approx(d.mean()/d.std(ddof=1)))
    assert got.effect == pytest.approx(stats.ttest_1samp(d, 0).statistic/2)  # t = d·√n
    assert m.paired(b, a).effect == pytest.approx(-got.effect) and 'effect +0.94' in str(got) and repr(got) == got._repr_markdown_()


def test_effect_at_the_edges():
    assert m.paired(rows(6), rows(6, 'b')).effect == 0
    assert m.paired(rows(6), rows(6, 'b', n_achievements=2)).effect == -np.inf
    assert np.isnan(m.paired(rows(1, n_achievements=3), rows(1, 'b')).effect)


def test_a_pair_tells_of_every_planned_episode_without_a_score():
    "Also of seeds that neither side finished, and of one sample of a seed whose others were finished"
    a = rows(5, seed=[0, 0, 1, 2, 3], status=['done', 'error', 'done', 'planned', 'done'])
    b = rows(4, 'b', status=['done', 'done', 'truncated', 'cancelled'])
    got = m.paired(a, b)
    assert (got.n, got.only_a, got.only_b, got.failed) == (2, 1, 0, 4)
    assert str(got).endswith('(left out: 1 that only a finished, 4 episodes without a score)')
    assert 'left out' not in str(m.paired(rows(3), rows(3, 'b')))


def test_success_rates_say_how_many_were_planned():
    r = m.success_rates(pd.concat([rows(3), rows(2, status='error'), rows(4, 'b', status='planned')]))
    assert r.loc[('a', 'collect_wood'), ['planned', 'n', 'unlocked']].tolist() == [5, 3, 3]
    assert r.loc[('b', 'collect_wood'), ['planned', 'n']].tolist() == [4, 0]


def test_a_ratio_over_ones_is_a_mean():
    v, worlds = np.random.default_rng(0).gamma(2, size=24), np.repeat(range(8), 3)
    assert np.allclose([*m.ratio_ci(v, np.ones(24), worlds).ci95], m.mean_ci(v, worlds).ci95)


def test_ratio_interval_is_the_bootstraps():
    "Resampling pairs of sums is the other road to the interval of a ratio"
    rng = np.random.default_rng(0)
    below = rng.poisson(6, size=200).astype(float)
    above = 500*below + 2000*rng.random(200)
    got, theirs = m.ratio_ci(above, below), stats.bootstrap((above, below), lambda x, y, axis=-1: x.sum(axis)/y.sum(axis), paired=True, rng=0).confidence_interval
    assert got.value == pytest.approx(above.sum()/below.sum()) and np.allclose(got.ci95, theirs, rtol=.005)


def test_coverage_of_the_ratio_interval():
    rng, held = np.random.default_rng(0), 0
    for _ in range(400):
        below = rng.poisson(5, size=30)
        held += (e := m.ratio_ci(300*below + rng.gamma(2, 500, size=30), below)).lo <= (300*5 + 1000)/5 <= e.hi
    assert .91 <= held/400 <= .98


def test_costs_are_sums_over_sums_and_failures_are_paid_for():
    eps = rows(4, n_achievements=[4, 0, np.nan, np.nan], status=['done', 'done', 'error', 'planned'], calls=[20, 20, 5, 0], cost_usd=[.1, .3, .4, None],
        input_tokens=[100, 300, 200, None], output_tokens=[10, 10, 20, None])
    c = m.costs(eps).loc['a']
    assert (c.planned, c.n, c.errors, c.unfinished, c.achievements, c.tokens) == (4, 2, 1, 1, 4, 640)
    assert (c.tokens_per_achievement, c.usd_per_achievement) == (160, pytest.approx(.2)) and c.usd_per_achievement_lo < .2 < c.usd_per_achievement_hi
    # four copies of each world are not four worlds
    assert m.costs(pd.concat(4*[eps])).loc['a', 'usd_per_achievement_hi'] == pytest.approx(c.usd_per_achievement_hi)


def test_costs_at_the_edges():
    assert m.costs(rows(3)).loc['a', ['usd_per_achievement', 'usd_per_achievement_lo']].tolist() == [0, 0]  # free is known to be free
    nothing = m.costs(rows(3, n_achievements=0, cost_usd=.1)).loc['a']
    assert np.isinf(nothing.usd_per_achievement) and np.isnan(nothing.usd_per_achievement_hi)
    unknown = m.costs(rows(3, cost_usd=[.1, None, .1])).loc['a']
    assert unknown[['cost_usd', 'usd_per_achievement']].isna().all() and unknown.tokens_per_achievement == 110
    assert m.costs(rows(2, calls=0, n_achievements=0)).loc['a', ['usd_per_achievement', 'tokens_per_achievement']].isna().all()
    assert m.costs(pd.concat([rows(2), rows(3, 'b')]), by=['model', 'run_id']).n.to_dict() == {('a', 'r'): 2, ('b', 'r'): 3}


@pytest.mark.parametrize('paired', [True, False])
@pytest.mark.parametrize('n, d, sd', [(2, 1, 1), (5, 1, .3), (10, -.5, 1), (30, 3, 1), (500, .1, 1.5)])
def test_power_is_that_of_a_t_test(n, d, sd, paired):
    df, shift = (n-1, abs(d)/sd*np.sqrt(n)) if paired else (2*n-2, abs(d)/sd*np.sqrt(n/2))
    reach = lambda chi2: stats.t.ppf(.975, df)*np.sqrt(chi2/df)  # the test rejects when a normal number leaves it
    power = stats.chi2.expect(lambda c: stats.norm.sf(reach(c) - shift) + stats.norm.cdf(-reach(c) - shift), (df,))
    assert m.power_of(n, d, sd, paired) == pytest.approx(power, abs=1e-5)


@pytest.mark.parametrize('d, needed', [(.2, 199), (.5, 34), (.8, 15)])
def test_episodes_needed_is_what_the_textbook_says(d, needed):
    "Cohen 1988, two-sided 5 %, power 80 %: for pairs 199, 34 and 15; for two groups 394, 64 and 26 (table 2.4.1 rounds down 393.4)"
    assert m.episodes_needed(d, 1) == m.episodes_needed(-10*d, 10) == needed
    assert m.episodes_needed(d, 1, paired=False) == {.2: 394, .5: 64, .8: 26}[d]


@pytest.mark.parametrize('power', [.5, .8, .95])
def test_episodes_needed_is_the_least_number_that_does(power):
    for d in (.05, .4, 3.):
        n = m.episodes_needed(d, 1., power)
        assert m.power_of(n, d, 1.) >= power and (n == 2 or m.power_of(n-1, d, 1.) < power)


@pytest.mark.parametrize('paired', [True, False])
def test_as_many_episodes_as_planned_find_the_difference_as_often_as_planned(paired):
    "Whole comparisons, through `paired` or scipy's two-sample test, of worlds that are kind or unkind to both sides"
    rng, d, own, shared = np.random.default_rng(0), 1., 1.2, 2.
    sd = own*np.sqrt(2) if paired else np.hypot(own, shared)
    n, found = m.episodes_needed(d, sd, paired=paired), 0
    for _ in range(400):
        luck, other = rng.normal(0, shared, n), rng.normal(0, shared, n)
        x, y = 5 + d + luck + rng.normal(0, own, n), 5 + (luck if paired else other) + rng.normal(0, own, n)
        found += (m.paired(rows(n, n_achievements=x), rows(n, 'b', n_achievements=y)).p if paired else stats.ttest_ind(x, y).pvalue) < .05
    assert .74 <= found/400 <= .86


def test_without_a_difference_no_more_is_found_than_chance_allows(): assert m.power_of(20, 0, 1) == pytest.approx(.05)


@pytest.mark.parametrize('args, says', [((0, 1), 'difference of 0'), ((1, 0), 'standard deviation of 0'), ((1, np.nan), 'standard deviation of nan'),
    ((1, 1, 1.), 'power of 1 '), ((1, 1, .05), 'power of 0.05'), ((1, 1, 80), 'power of 80')])
def test_what_cannot_be_planned_is_refused(args, says):
    with pytest.raises(m.MetricsError, match=says): m.episodes_needed(*args)


def test_sql_and_pandas_average_episodes_not_their_steps(tmp_path):
    "10 steps of reward 0 and 2 steps of reward 1 in all: the mean is 1/2 by every road that is offered, and 1/12 a step only where steps are asked for"
    from synth_lab.traces import Store
    store = Store(tmp_path/'lab')
    ids = [dict(episode_id=f'r:{s}:0', seed=s, sample=0) for s in (0, 1)]
    config = dict(model='a', endpoint='local', split='eval', difficulty='normal', rng='pure', length=200)
    step = lambda n, reward: dict(step=n, action='noop', effect='', reward=reward, unlocked=['wake_up'] if reward else [], health=9, terminated=False, truncated=False)
    with store.run('r', config, ids) as w:
        for e, rewards in zip(ids, ([0.]*10, [0., 1.])):
            who = dict(episode_id=e['episode_id'], attempt=1)
            w.write('episode', **who, started_at='2026-01-31T12:00:00.000Z')
            w.call([], **who, turn=1, call_id=e['episode_id'], model='a', verdict='ok', turn_reward=int(sum(rewards)), input_tokens=1, output_tokens=1, cost_usd=0.,
                steps=[step(n, r) for n, r in enumerate(rewards, 1)])
            w.write('episode_end', **who, status='done', achievements=['wake_up'] if any(rewards) else [], turns=1, calls=1, unusable=0, steps_played=len(rewards),
                input_tokens=1, output_tokens=1, cost_usd=0., ended_at='2026-01-31T12:01:00.000Z', **{'return': sum(rewards)})
    s = m.summary(store.sql('FROM episodes')).loc['a']
    assert (s.n, s.mean_return, s.mean_achievements) == (2, .5, .5)
    one = lambda q: store.rows(q)[0]['v']
    assert one('SELECT avg("return") AS v FROM episodes') == .5
    assert one("SELECT avg(value) AS v FROM rewards WHERE scope = 'episode' AND name = 'return'") == .5
    assert one('SELECT avg(r) AS v FROM (SELECT sum(reward) AS r FROM steps GROUP BY episode_id)') == .5
    assert one('SELECT avg(reward) AS v FROM steps') == pytest.approx(1/12)


def test_one_sql_over_the_store_gives_the_same_numbers(tmp_path):
    from synth_lab.traces import Store
    store, rng = Store(tmp_path/'lab'), np.random.default_rng(0)
    for model,skill in (('good', .6), ('bad', .2)):
        ids = [dict(episode_id=f'{model}:{s}:{k}', seed=s, sample=k) for s in range(8) for k in range(2)]
        config = dict(model=model, endpoint='local', split='eval', difficulty='normal', rng='pure', length=200)
        with store.run(f'run-{model}', config, ids) as w:
            for i,e in enumerate(ids[:-1]):  # the last one stays planned
                names = [a for a in ACHIEVEMENTS if rng.random() < skill]
                status = ['done', 'error', 'truncated'][(i == 3) + 2*(i == 5)]
                w.write('episode', episode_id=e['episode_id'], attempt=1, started_at='2026-01-31T12:00:00.000Z')
                w.write('episode_end', episode_id=e['episode_id'], attempt=1, status=status, achievements=names, turns=19, calls=20, unusable=i % 3, steps_played=10+i,
                    input_tokens=1000+i, output_tokens=10, cost_usd=.001*i, ended_at='2026-01-31T12:01:00.000Z', **{'return': len(names) - .1*i})
    eps = store.sql('SELECT * FROM episodes')
    totals = store.sql("""SELECT model, count(*) AS planned, count(*) FILTER (status = 'done') AS n, count(*) FILTER (status = 'truncated') AS truncated,
            count(*) FILTER (status = 'error') AS errors, count(*) FILTER (status = 'planned') AS unfinished,
            avg(n_achievements) FILTER (status = 'done') AS mean_achievements, avg("return") FILTER (status = 'done') AS mean_return, avg(steps) FILTER (status = 'done') AS mean_steps,
            avg(input_tokens + output_tokens) FILTER (status = 'done') AS mean_tokens,
            sum(unusable) FILTER (status = 'done') / sum(turns) FILTER (status = 'done') AS unusable,
            sum(cost_usd) AS cost_usd FROM episodes GROUP BY model""").set_index('model')
    ours = m.summary(eps).loc[totals.index]
    assert ours[['planned', 'n', 'truncated', 'errors', 'unfinished']].to_numpy().tolist() == [[16, 13, 1, 1, 1]]*2
    pd.testing.assert_frame_equal(ours[totals.columns], totals, check_dtype=False)
    rates = store.sql("""SELECT model, a AS achievement, avg(list_contains(achievements, a)::INT) AS rate
        FROM episodes, (SELECT unnest(?) AS a) WHERE status = 'done' GROUP BY ALL""", list(ACHIEVEMENTS)).set_index(['model', 'achievement']).rate
    assert np.allclose(m.success_rates(eps).rate, rates.loc[m.success_rates(eps).index])
    score = np.expm1(np.log1p(100*rates).groupby('model').mean())
    assert np.allclose(ours.crafter_score, score.loc[ours.index])


def test_an_episode_that_does_not_say_its_seed_is_a_world_of_its_own():
    "As imported ones may not, and not by which rules they were played"
    v,seeds = [1, 2, 3, 5],pd.array([4, None, 4, None], 'Int32')
    assert m.mean_ci(v, seeds) == m.mean_ci(v, [4, 10, 4, 11]) and m.n_worlds(seeds) == 3 and m.n_worlds([]) == 0
    told = dict(model='a', status='done', seed=[1, 2], n_achievements=[3, 5], difficulty=None, rng=None, length=pd.array([None]*2, 'Int32'))
    a,b = pd.DataFrame(told),pd.DataFrame(told | dict(model='b', n_achievements=[1, 1]))
    assert m.paired(a, b).diff == 3
    with pytest.raises(m.MetricsError, match='another game'): m.paired(a, b.assign(length=10))
