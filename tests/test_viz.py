"Figures show the numbers they say, by another road; and nothing that a control can do goes wrong unseen"
import asyncio, io
from types import SimpleNamespace

import numpy as np, pandas as pd, pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image
from scipy import optimize, stats

from synth_lab import Lab, viz
from synth_lab.core import LabError
from synth_lab.metrics import MetricsError
from synth_lab.viz import PALETTE, Group, Notice, Picture, colours, guarded, in_order, reward_explorer, reward_figure
from synth_lab.world import ACHIEVEMENTS

NAMES = list(ACHIEVEMENTS)


def rows(model, worlds, samples=1, seed=0, run_id=None, status='done', **more):
    "Made-up episodes: `samples` of each world, that unlock the first few achievements of the list at known steps"
    rng = np.random.default_rng(seed)
    out = []
    for k in range(worlds*samples):
        n = int(rng.integers(0, 12))
        steps = sorted(rng.integers(1, 100, n).tolist())
        out.append(dict(run_id=run_id or model, episode_id=f'{run_id or model}:{k}', model=model, seed=k//samples, difficulty='normal', rng='pure', length=100,
            status=status, achievements=NAMES[:n], unlock_steps=steps, n_achievements=n, steps=100, calls=10, input_tokens=1000+k, output_tokens=10,
            cost_usd=.01*(k+1), started_at=pd.Timestamp('2026-01-01', tz='UTC')+pd.Timedelta(seconds=k)) | {'return':n-.1*k} | more)
    return pd.DataFrame(out)


@pytest.fixture(autouse=True)
def no_error_unseen():
    viz.ERRORS.clear()
    yield
    assert not viz.ERRORS


@pytest.fixture(scope='module')
def many():
    broken = rows('slow', 3, seed=5, status='error', n_achievements=np.nan, achievements=None, unlock_steps=None, **{'return':np.nan})
    return pd.concat([rows('fast', 12, 2, 1), rows('slow', 15, 1, 2), broken, rows('fast', 9, 1, 3, run_id='again'), rows('dear', 6, 1, 4, cost_usd=np.nan)],
        ignore_index=True)


def interval(values, worlds):
    "Mean and 95 % interval over worlds, from its formula, one world at a time"
    v = pd.Series(np.asarray(values, float))
    residuals = (v-v.mean()).groupby(np.asarray(worlds)).sum()
    g = len(residuals)
    half = stats.t.ppf(.975, g-1)*np.sqrt(g/(g-1)*(residuals**2).sum())/len(v)
    return v.mean(),v.mean()-half,v.mean()+half


def score_interval(rate, n):
    "Ends of Wilson's interval: where the rate is as far off as a 95 % test allows"
    off = lambda p: abs(rate-p) - stats.norm.ppf(.975)*np.sqrt(p*(1-p)/n)
    return (0 if rate == 0 else optimize.brentq(off, 1e-9, rate-1e-12) if rate < 1 else optimize.brentq(off, 1e-9, 1-1e-6)),(
        1 if rate == 1 else optimize.brentq(off, rate+1e-12, 1-1e-9))


def texts(fig): return '\n'.join(o.get_text() for o in fig.findobj(lambda o: hasattr(o, 'get_text')))
def curves_of(fig): return [o for o in fig.axes[0].lines if len(o.get_xdata()) > 1 and o.get_marker() in ('None', None, '')]


# ---- numbers


def test_moving_means_are_those_of_the_window(many):
    own = in_order(many[many.model == 'fast'])
    m = viz.moving(own, 'return', 7)
    done = own[own.status == 'done'].reset_index(drop=True)
    rolling = done['return'].rolling(7).mean().dropna()
    assert m['mean'].tolist() == pytest.approx(rolling.tolist())
    for row in m.itertuples():
        part = done[done.nth.between(row.first, row.last)]
        assert (row.mean, row.lo, row.hi) == pytest.approx(interval(part['return'], part.seed))


def test_a_window_wider_than_the_run_is_the_mean_of_all(many):
    own = in_order(many[many.model == 'slow'])
    m, = viz.moving(own, 'n_achievements', 500).itertuples()
    done = own[own.status == 'done']
    assert (m.mean, m.lo, m.hi) == pytest.approx(interval(done.n_achievements, done.seed))
    line = curves_of(viz.curves(many[many.model == 'slow'], window=500))[0]
    assert line.get_ydata().tolist() == pytest.approx([done.n_achievements.mean()]*2)


def test_failed_episodes_keep_their_place_and_are_counted():
    own = rows('a', 20)
    own.loc[[4, 11], 'status'] = 'error'
    own.loc[15, 'status'] = 'truncated'
    own.loc[16, 'status'] = 'running'
    fig = viz.curves(own.set_axis([0]*20), window=3) # as `pd.concat` may leave it
    lost, = (o for o in fig.axes[0].lines if o.get_marker() == 'x')
    assert lost.get_xdata().tolist() == [5, 12, 16, 17]
    assert 'n = 16, 2 failed, 1 cut\nshort, 1 not over' in texts(fig)
    for name in ('progress', 'distribution', 'success', 'survival', 'frontier'): assert 'n = 16, 2 failed' in texts(reward_figure(own, name)), name


def test_order_of_play_is_that_of_the_clock():
    own = rows('a', 6)
    assert in_order(own.sample(frac=1, random_state=1)).episode_id.tolist() == own.episode_id.tolist()


def test_achievements_by_step_counted_from_a_long_table(many):
    own = many[(many.model == 'fast')]
    long = own.explode(['achievements', 'unlock_steps'])
    m = viz.by_step(own).set_index('step')
    for t in (0, 10, 50, 100):
        by = (long.unlock_steps.astype(float) <= t).groupby(long.episode_id).sum().reindex(own.episode_id)
        assert m.loc[t].tolist() == pytest.approx(interval(by, own.seed), nan_ok=True)
    assert m['mean'].iloc[-1] == pytest.approx(own.n_achievements.mean())
    some = viz.by_step(own, NAMES[2:4])['mean'].iloc[-1]
    assert some == pytest.approx(long.achievements.isin(NAMES[2:4]).sum()/len(own))


def test_survival_ends_at_what_the_success_rate_leaves(many):
    own = many[many.model == 'fast']
    steps,share,lo,hi = viz.still_without(own, NAMES[:5])
    long = own.explode(['achievements', 'unlock_steps'])
    for k,name in enumerate(NAMES[:5]):
        when = long[long.achievements == name].set_index('episode_id').unlock_steps.reindex(own.episode_id).astype(float)
        for j in (0, 20, 55, len(steps)-1):
            rate = 1 - (when <= steps[j]).mean()
            assert share[j,k] == pytest.approx(rate)
            assert (lo[j,k], hi[j,k]) == pytest.approx(score_interval(rate, own.seed.nunique()), abs=1e-6)
    assert share[-1].tolist() == pytest.approx([1-sum(a in o for o in own.achievements)/len(own) for a in NAMES[:5]])
    fig = viz.survival(own, achievements=NAMES[:2])
    bands,middle = fig.axes[0].collections[:2]
    assert middle.get_segments()[1][:,1].tolist() == pytest.approx(share[:,1].tolist())


def test_bars_are_rates_and_sorted(many):
    two = many[many.run_id.isin(['again', 'dear'])]
    fig = viz.success_bars(two, by='run_id')
    rates = two.explode('achievements').groupby(['run_id', 'achievements']).size().unstack(fill_value=0).reindex(columns=NAMES, fill_value=0)
    rates = rates.div(two.groupby('run_id').size(), axis=0)
    order = rates.sum().sort_values(ascending=False, kind='stable')
    drawn = [[p.vertices[:,0].max() for p in o.get_paths()] for o in fig.axes[0].collections[::2]]
    assert drawn[0] == pytest.approx(rates.loc['again', order.index].tolist())
    assert drawn[1] == pytest.approx(rates.loc['dear', order.index].tolist())
    names = [o.get_text() for o in fig.axes[0].texts][:22]
    assert names == [o.replace('_', ' ') for o in order.index]


def test_a_run_beside_has_the_colour_of_its_model_and_is_compared_world_by_world(many):
    fig = reward_figure(many, 'success', runs=['slow'], beside='again', achievements=NAMES[:4])
    said = texts(fig).replace('\n', ' ')
    a,b = (many[many.run_id == o].query("status == 'done'").set_index('seed').achievements.map(lambda o: len({*o} & {*NAMES[:4]})) for o in ('slow', 'again'))
    d = (a-b).dropna()
    assert f'slow − beside: again, world by world: {d.mean():+.2f} achievements' in said and 'on 9 shared seeds' in said
    assert f'p\u00a0=\u00a0{stats.ttest_1samp(d, 0).pvalue:.2g}' in said
    first,second = (o.get_facecolor()[0] for o in fig.axes[0].collections[::2])
    look = colours(['slow', 'fast'])
    assert [*first[:3], *second[:3]] == pytest.approx([*viz.to_rgb(look['slow']), *viz.to_rgb(look['fast'])])


def test_games_that_are_not_the_same_are_not_compared_and_that_is_said(many):
    hard = many[many.run_id == 'again'].assign(difficulty='hard', run_id='hard')
    said = texts(reward_figure(pd.concat([many, hard]), 'success', runs=['slow'], beside='hard')).replace('\n', ' ')
    assert 'not compared world by world: the same seed is another game' in said and 'games of different difficulty are mixed: hard, normal' in said


def test_histogram_is_the_table_of_values(many):
    fig = viz.distribution(many[many.model == 'fast'])
    own = many[many.model == 'fast'].n_achievements
    step, = fig.axes[0].patches
    top = float(fig.axes[0].get_yticklabels()[1].get_text().rstrip('%'))/100
    found = dict(zip((step.get_data().edges[:-1]+.5).round().astype(int), np.asarray(step.get_data().values)*top/.74))
    assert {k:v for k,v in found.items() if v} == pytest.approx(own.value_counts(normalize=True).to_dict())
    assert 'mean {:.2f} [{:.2f}, {:.2f}]'.format(*interval(own, many[many.model == 'fast'].seed)) in texts(fig)


def test_cost_counts_the_failed_and_an_unknown_one_stays_unknown(many):
    t = viz.spending(viz.groups(many), cost='usd')
    slow = many[many.model == 'slow']
    assert t.cost['slow'] == pytest.approx(slow.cost_usd.sum()/(slow.status == 'done').sum())
    assert np.isnan(t.cost['dear']) and not t.best['dear']
    fig = viz.frontier(many, cost='usd')
    assert f'{t.value["dear"]:.2f}, cost unknown' in texts(fig) and 'cost\nunknown' in texts(fig)
    dear = colours(many.model)['dear']
    at = [o for o in fig.axes[0].lines if o.get_color() == dear and o.get_marker() == 'o' and len(np.atleast_1d(o.get_xdata())) == 1]
    assert at[0].get_transform() == fig.axes[0].get_yaxis_transform()  # at no place of the cost axis
    tokens = viz.spending(viz.groups(many), cost='tokens')
    assert tokens.cost['dear'] == pytest.approx((many[many.model == 'dear'].input_tokens+10).mean()) and 'cost unknown' not in texts(viz.frontier(many))


def test_the_front_by_trying_all_pairs():
    rng = np.random.default_rng(3)
    eps = pd.concat([rows(f'm{k}', 4, seed=k, n_achievements=int(rng.integers(0, 5)), input_tokens=int(rng.integers(1, 6))) for k in range(8)])
    t = viz.spending(viz.groups(eps))
    for a in t.itertuples():
        beaten = [b for b in t.itertuples() if b.cost <= a.cost and b.value >= a.value and (b.cost, b.value) != (a.cost, a.value)]
        assert a.best == (not beaten)


def test_chosen_achievements_are_all_that_counts(many):
    assert viz.counting(many, NAMES[:3]).n_achievements.dropna().tolist() == [len({*o} & {*NAMES[:3]}) for o in many.achievements if isinstance(o, list)]
    assert 'of 3 chosen' in viz.curves(many, achievements=NAMES[:3]).axes[0].get_title(loc='left')
    with pytest.raises(MetricsError, match='did you mean `collect_wood`'): viz.curves(many, achievements=['collect_wod'])


def test_what_has_no_number_is_left_out_and_said(many):
    own = many[many.run_id == 'again'].copy()
    own.loc[own.index[:2], 'return'] = np.nan
    own['unlock_steps'] = own.unlock_steps.where(own.index != own.index[own.n_achievements > 0][0], None)
    assert '2 episodes without `return` are left out' in texts(viz.curves(own, 'return')) and 'n = 7' in texts(viz.curves(own, 'return'))
    assert '1 episodes do not say when' in texts(viz.survival(own)) and 'n = 8' in texts(viz.survival(own))


def test_where_nothing_can_be_said_nothing_is_said():
    one = rows('a', 1)
    assert texts(viz.distribution(one)).count(f'mean {one.n_achievements[0]:.2f}\n') == 1 and 'nan' not in texts(viz.distribution(one))
    lost = texts(viz.frontier(pd.concat([one, rows('b', 2, status='error')])))
    assert 'n = 0, 2 failed\nno mean, cost unknown' in lost and 'nan' not in lost
    for values,edges in (([0, 3, 1], [-.5, .5, 1.5, 2.5, 3.5]), ([2.5, 2.5], [2, 3]), ([0, .5, 1], 26), ([0, 100], 26)):
        found = viz._edges(np.array(values, float))
        assert len(found) in (26, 27) if edges == 26 else found.tolist() == edges


# ---- looks


def test_a_model_keeps_its_colour_and_two_never_share_one():
    box = colours(['random', 'expert', 'ft:student:job_1', 'rl:ft:student:job_1:job_2', 'human'])
    assert list(box.values()) == [PALETTE[o] for o in ('green', 'blue', 'black', 'grey', 'vermillion')]
    alone = colours(['qwen3'])['qwen3']
    assert alone == colours(['qwen3', 'random', 'ft:a:b', 'expert'])['qwen3'] and alone not in box.values()
    pairs = [(a, b) for a in ('qwen3', 'llama', 'gpt-4.1', 'o3') for b in ('mistral', 'gemma', 'phi')]
    for a,b in pairs: assert colours([a, b])[a] == colours([a])[a] or colours([a, b])[b] == colours([a])[a]  # it gives way to one of the same colour only
    nine = [f'model-{k}' for k in range(9)]
    assert sorted(colours(nine).values()) == sorted(PALETTE.values()) and len(colours([*nine, 'one more'])) == 10


def test_runs_of_one_model_differ_by_dash_and_tint(many):
    a,b = (g for g in viz.groups(many, 'run_id') if g.name in ('fast', 'again'))
    assert a.colour == b.colour and a.line != b.line and a.tint != b.tint and a.mark != b.mark


def test_pictures_are_small_and_do_not_depend_on_the_page(many):
    from matplotlib import rc_context
    usual = viz.curves(many).png()
    with rc_context({'axes.grid':False, 'font.size':20, 'axes.spines.top':True}): assert viz.curves(many).png() == usual
    for view in viz.VIEWS: assert len(reward_figure(many, view, by='run_id', achievements=NAMES).png()) < 60_000


def test_names_that_matplotlib_would_typeset_are_left_alone():
    assert reward_figure(rows('$a_b$ and $x', 3), 'distribution').png()
    assert viz.short('a'*40) == 'a'*9+'…'+'a'*11


def test_more_groups_than_there_is_room_for(many):
    fig = reward_figure(pd.concat([rows(f'm{k}', 3) for k in range(11)]), 'frontier')
    assert 'the first 8 of 11 groups' in texts(fig) and fig.png()


# ---- guard


def test_a_callback_that_fails_is_seen_and_kept():
    notice = Notice()
    @guarded(notice)
    def plain(x): return 1/x
    @guarded(notice)
    async def late(x): raise LabError('no such <thing>', 'take another')
    plain(0)
    assert isinstance(notice.error, ZeroDivisionError) and 'ZeroDivisionError: division by zero' in notice.value and 'test_viz.py' in notice.value
    asyncio.run(late(1))
    assert 'no such &lt;thing&gt; → take another' in notice.value and '<details>' not in notice.value
    assert [type(viz.ERRORS.pop()) for _ in range(2)] == [LabError, ZeroDivisionError]
    assert plain(4) == .25 and (notice.value, notice.error, notice.failures) == ('', None, 2)


def test_what_a_callback_sets_off_may_fail_without_being_wiped_away():
    notice = Notice()
    inner = guarded(notice)(lambda: {}['absent'])
    guarded(notice)(lambda: inner())()
    assert isinstance(viz.ERRORS.pop(), KeyError) and 'absent' in notice.value


def test_no_key_in_an_error(monkeypatch):
    monkeypatch.setenv('GROQ_API_KEY', 'gsk_0123456789abcdef')
    notice = Notice()
    def fails(): raise ValueError('sent gsk_0123456789abcdef')
    guarded(notice)(fails)()
    assert viz.ERRORS.pop() and 'gsk_0' not in notice.value and '[redacted]' in notice.value


# ---- the widget


@pytest.fixture(scope='module')
def made(many):
    explorer = reward_explorer(SimpleNamespace(episodes=many))
    return explorer,explorer.lab,{k:o.value for k,o in explorer.controls.items()},explorer.image.value


@pytest.fixture
def explorer(made):
    "An explorer as it is at first"
    explorer,explorer.lab,start,image = made[0],*made[1:]
    explorer.held = True
    explorer.read()
    for k,value in start.items(): explorer.controls[k].value = value
    explorer.held,explorer.image.value = False,image
    explorer.notice.clear()
    return explorer


def size(explorer): return Image.open(io.BytesIO(explorer.image.value)).size


def extremes(control):
    "The least and the most that a control can be set to"
    if isinstance(control, viz.W.SelectMultiple): return [(), control._options_values[:1], control._options_values]
    if isinstance(control, viz.W.IntRangeSlider): return [(1, 1), (control.max, control.max), (1, control.max)]
    return list(dict.fromkeys([control._options_values[0], control._options_values[-1]]))


def test_each_control_at_its_extremes(explorer):
    for name,control in explorer.controls.items():
        explorer.held,explorer.controls['view'].value,explorer.held = True,dict(beside='success', cost='frontier').get(name, 'curves'),False
        seen = set()
        for value in extremes(control):
            control.value = value
            seen.add(explorer.image.value)
            assert explorer.notice.value == ''
        assert len(seen) > 1, f'`{name}` moves nothing'


@pytest.mark.parametrize('view', list(viz.VIEWS))
def test_each_view_with_all_controls_at_their_extremes(explorer, view):
    for end in (0, -1):
        explorer.held = True
        for name,control in explorer.controls.items(): control.value = view if name == 'view' else extremes(control)[end]
        explorer.held = False
        explorer.redraw()
        assert explorer.notice.value == '' and size(explorer)[0] == 720
    off = [k for k,o in explorer.controls.items() if o.disabled]
    assert {*off} == {'value', 'window', 'beside', 'cost'} - {*viz.VIEWS[view][2]}


def test_what_the_widget_shows_a_script_can_have(explorer, many):
    explorer.controls['view'].value = 'distribution'
    explorer.controls['models'].value = 'fast', 'slow'
    explorer.controls['episodes'].value = 3, 9
    call = explorer.call.value.split('>', 1)[1].rsplit('<', 1)[0].replace('&#x27;', "'")
    assert call == "reward_figure(lab.episodes, view='distribution', models=('fast', 'slow'), first=3, last=9)"
    same = eval(call, dict(reward_figure=reward_figure, lab=SimpleNamespace(episodes=many)))
    assert same.png() and texts(same) == texts(explorer.picture) and 'n = 7' in texts(same)


def test_an_error_in_a_callback_is_shown_and_no_old_figure_stands(explorer):
    before = explorer.image.value
    explorer.episodes = explorer.episodes.drop(columns='seed')
    explorer.controls['window'].value = 50
    assert 'no column `seed`' in explorer.notice.value and isinstance(viz.ERRORS.pop(), MetricsError)
    assert explorer.image.value != before and texts(explorer.picture) == 'Not drawn'
    explorer.reread()
    assert explorer.notice.value == '' and size(explorer)[0] == 720


def test_a_lab_that_cannot_be_read_any_more(explorer):
    class Gone:
        @property
        def episodes(self): raise LabError('the folder is gone', 'bring it back')
    explorer.lab = Gone()
    explorer.reread()
    assert 'the folder is gone → bring it back' in explorer.notice.value and viz.ERRORS.pop()


def test_reading_again_keeps_what_was_chosen(many):
    lab = SimpleNamespace(episodes=many[many.run_id != 'dear'])
    explorer = reward_explorer(lab, runs=('fast', 'again'), beside='slow', view='success')
    was = explorer.controls['episodes'].value
    lab.episodes = pd.concat([many, rows('fast', 30, run_id='new')])
    explorer.reread()
    assert explorer.controls['runs'].value == ('fast', 'again') and explorer.controls['beside'].value == 'slow'
    assert 'new' in explorer.controls['beside']._options_values and explorer.controls['episodes'].value[1] == was[1]+30
    lab.episodes = many[many.run_id == 'again']
    explorer.reread()
    assert explorer.controls['runs'].value == ('again',) and explorer.controls['beside'].value is None and size(explorer)


def test_a_start_that_is_not_there(many):
    lab = SimpleNamespace(episodes=many)
    for start,why in ((dict(window=7), 'cannot set window to 7 → choose of 1, 2'), (dict(runs=['fats']), 'cannot set runs to .*choose of fast, slow'),
            (dict(episodes=9), r'give \(first, last\)')):
        with pytest.raises(LabError, match=why): reward_explorer(lab, **start)
    assert reward_explorer(lab, models=pd.Index(['slow']), runs='slow').settings['models'] == ('slow',)
    with pytest.raises(LabError, match='did you mean `view`'): reward_explorer(lab, viev='survival')
    with pytest.raises(MetricsError, match='did you mean `survival`'): reward_figure(many, 'survivel')
    with pytest.raises(MetricsError, match='no episode has run_id `fats` → did you mean `fast`'): reward_figure(many, runs=['fats'])


def test_a_selection_without_episodes_says_so(many):
    fig = reward_figure(many, runs=['slow'], models=['fast'])
    assert texts(fig) == 'No episode is in this selection' and fig.png()


@pytest.mark.parametrize('view', list(viz.VIEWS))
def test_odd_tables(view):
    failed = rows('a', 2, n_achievements=0, achievements=None, unlock_steps=None, cost_usd=np.nan, status='error')
    alike = rows('a', 3, n_achievements=3, achievements=None, input_tokens=pd.NA, cost_usd=None, **{'return':2.})
    alike['achievements'],alike['unlock_steps'] = [NAMES[:3]]*3,[[1, 1, 100]]*3
    for eps in (rows('a', 1, cost_usd=0.), failed, alike):
        assert reward_figure(eps, view, by='run_id', cost='usd').png()


def test_a_lab_of_imported_episodes(tmp_path):
    "Which do not say how long a game is, when it unlocked what, and sometimes not what"
    lab = Lab(tmp_path/'lab', endpoint='local')
    step = dict(obs={}, tool_calls=[], reward=1., done=True, info=dict(achievements_added=NAMES[:2]))
    played = dict(trajectories=[dict(steps=[step], env_id='crafter', policy_id='p')], metrics=dict(episode_returns=[1.], mean_return=1.))
    for run in ('a', 'b'): lab.import_rollout(played | dict(run_id=run))
    found = lab.episodes
    assert found.length.isna().all() and found.unlock_steps.isna().all()
    explorer = reward_explorer(lab, by='run_id')
    for view in viz.VIEWS:
        explorer.controls['view'].value = view
        assert explorer.notice.value == '' and ('when it unlocked what' in texts(explorer.picture)) == (view in ('progress', 'survival')), view
    bare = found.assign(n_achievements=pd.NA)
    for view in ('curves', 'distribution', 'success', 'frontier'): assert 'no episode here has its `n_achievements`' in texts(reward_figure(bare, view))
    with pytest.raises(MetricsError, match='choose another column'): viz.curves(bare)


def test_an_empty_lab_and_then_one_run(tmp_path):
    lab = Lab(tmp_path/'lab', endpoint='local')
    explorer = reward_explorer(lab)
    assert texts(explorer.picture) == 'There are no episodes yet'
    for view in viz.VIEWS: explorer.controls['view'].value = view
    lab.rollout_sync('random', range(3), length=30, run_id='chance')
    explorer.reread()
    assert explorer.controls['runs']._options_values == ('chance',) and explorer.controls['episodes'].max == 3
    for view in viz.VIEWS:
        explorer.controls['view'].value = view
        assert explorer.notice.value == '' and 'n = 3' in texts(explorer.picture)


def test_a_page_that_is_opened_without_a_kernel_has_the_picture(explorer, monkeypatch):
    "Whoever shows a page prefers the widget of an output to its picture, also where the widget is gone: so the picture is an output of its own"
    plain,_ = DisplayFormatter().format(explorer)  # of a script, or a page that is run without a browser
    shown = []
    monkeypatch.setattr(viz, '_in_notebook', lambda: True)
    monkeypatch.setattr(viz, 'display', lambda bundle, raw: shown.append(bundle))
    explorer._ipython_display_()
    widget,still = shown
    assert still == plain and plain.keys() == {'text/plain', 'image/png'} and plain['text/plain'] == 'reward_explorer(lab)'
    assert widget.keys() == {'text/plain', 'application/vnd.jupyter.widget-view+json'}
    assert len(str(shown)) < 100_000
