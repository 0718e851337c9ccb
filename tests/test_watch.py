"Widgets driven to the ends of their controls, figures held against the trace, and games by hand that replay like any other"
import json, re
from io import BytesIO
from types import SimpleNamespace

import numpy as np, pytest
from matplotlib.text import Text
from IPython.core.formatters import DisplayFormatter
from PIL import Image

from synth_lab import Lab, play as play_room, watch as room
from synth_lab.client import EndpointDown
from synth_lab.episode import RolloutError
from synth_lab.imports import import_rollout
from synth_lab.metrics import MetricsError
from synth_lab.play import Session, play
from synth_lab.replays import film
from synth_lab.traces import StoreError
from synth_lab.viz import ERRORS
from synth_lab.watch import Opened, WatchError, beside, fork_code, shown, so_far, told, watch
from synth_lab.world import ACTIONS, World

EVIL = '<script>alert(1)</script> costs $x_1$ and \\frac $$ 🎮 日本 \x07\t' + 'word '*400


class Odd:
    "A model that writes markup, fails to call, breaks off, and then acts"
    endpoint = SimpleNamespace(name='odd', in_process=False)
    def __init__(self): self.n = 0
    def cost(self, model, usage): return None
    async def post(self, payload):
        self.n += 1
        if self.n == 3: raise EndpointDown('the server <b>hung up</b>', 'start it')
        call = dict(id='c', function=dict(name='interact_many', arguments='{"actions": ["noop", "noop"]}'))
        message = dict(role='assistant', content=EVIL, **({} if self.n == 2 else dict(tool_calls=[call])))
        return dict(model='odd', choices=[dict(finish_reason='stop', message=message)]), [dict(http_status=200)]


@pytest.fixture(scope='module')
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp('watch')/'lab', endpoint='local')
    for model in ('expert', 'random'): lab.rollout_sync(model, range(2), run_id=model, length=200)
    odd = Session(lab, 5, Odd(), run_id='odd', length=6)
    for turns in (2, 1, None):
        try: odd.hand('odd', turns)
        except EndpointDown: pass
    return lab


@pytest.fixture(autouse=True)
def no_error_goes_unseen():
    ERRORS.clear()
    yield
    assert not ERRORS


def texts(fig): return [t.get_text() for t in fig.findobj(Text) if t.get_text()]
def said(fig): return ' '.join(' '.join(texts(fig)).split())
def plain(html): return re.sub(r'<[^>]+>', ' ', html)
def picture(widget): return np.asarray(Image.open(BytesIO(widget.value)).convert('RGB'))


# Figures

def test_a_figure_says_what_the_trace_says(lab):
    calls = lab.sql("SELECT * FROM calls WHERE episode_id = 'expert:1:0' ORDER BY turn").to_dict('records')
    for c in (calls[0], next(c for c in calls if c['turn_reward']), calls[-1]):
        fig = shown(lab, 'expert:1:0', c['turn'])
        steps = lab.sql("SELECT * FROM steps WHERE episode_id = 'expert:1:0' AND turn = ? ORDER BY step", c['turn']).to_dict('records')
        now = lab.sql("""SELECT sum(reward) AS r, sum(len(unlocked))::INT AS n FROM steps
            WHERE episode_id = 'expert:1:0' AND step <= ?""", steps[-1]['step']).iloc[0]
        words = said(fig)
        for part in (f'turn {c["turn"]} of {len(calls)}, expert', c['thought'], f'seen at step {steps[0]["step"]-1}', f'then, at step {steps[-1]["step"]}',
                f'reward {now.r:.1f}, {now.n:.0f} of 22 achievements', f'{c["input_tokens"]+c["output_tokens"]:,} tokens',
                f'Crafter, step {steps[0]["step"]-1} of 200', *(f'{s["step"]} {s["action"]}: {s["effect"]}' for s in steps)):
            assert ' '.join(part.split()) in words, part
        assert fig.axes[-1].lines[-1].get_xdata()[0] == steps[-1]['step']


def test_the_pictures_are_of_those_steps(lab):
    fig = shown(lab, 'expert:1:0', 4)
    seen,then = (ax.images[0].get_array() for ax in fig.axes[:2])
    m = Opened(lab, 'expert:1:0').moments
    last = [o for o in m if o.call['turn'] == 4][-1]
    assert (seen == lab.fork('expert:1:0', last.before).frame(216)).all() and (then == lab.fork('expert:1:0', last.step).frame(216)).all()


def test_the_timeline_is_the_episode(lab):
    row = lab.episode('expert:1:0').row
    reward,steps,dots,*_ = room.timeline(Opened(lab, 'expert:1:0')).axes[0].lines
    assert list(dots.get_xdata()) == row['unlock_steps'] and reward.get_ydata()[-1] == pytest.approx(row['return'])
    assert steps.get_ydata()[-1] == row['n_achievements'] and steps.get_xdata()[-1] == row['steps']


def test_a_step_within_a_turn(lab):
    o = Opened(lab, 'expert:1:0')
    m = next(m for m in o.moments if len(m.call['steps']) > 2 and m.played == 2)
    later = [text for kind,text in told(o, o.at(m.call['turn'], m.step)) if kind == 'later']
    assert len(later) == len(m.call['steps'])-2 and f'then, at step {m.step}' in said(shown(o, o.id, m.call['turn'], m.step))
    with pytest.raises(WatchError, match=f'choose one of {m.before+1} to'): shown(o, o.id, m.call['turn'], 1000)
    with pytest.raises(WatchError, match='has no turn 0'): shown(lab, o.id, 0)
    with pytest.raises(StoreError, match='did you mean'): shown(lab, 'expert:1:9', 1)


def test_figures_are_small(lab):
    worst = [shown(lab, 'random:1:0', 5), beside(lab, 'expert:0:0', 'random:0:0')]
    assert max(len(o.png()) for o in worst) < 60_000


# What models write

def test_what_a_model_wrote_is_text(lab):
    o = Opened(lab, 'odd:5:0')
    w = watch(lab, 'odd:5:0')
    w.more.selected_index = 1
    for k in range(len(o.moments)):
        w.slider.value = k
        for part in (w.said, w.text, w.reply, w.sent, w.about, w.score): assert '<script' not in part.value and '<b>hung' not in part.value
    assert '&lt;script&gt;alert(1)' in w.said.value


def test_a_figure_shows_formulas_emoji_and_floods_as_they_are(lab, recwarn):
    fig = shown(lab, 'odd:5:0', 1)
    fig.png()
    words = said(fig)
    assert '<script>alert(1)</script> costs $x_1$' in words and '□ □□' in words and 'more lines' in words
    assert not [o for o in recwarn if 'Glyph' in str(o.message)]


def test_replies_of_no_use_are_moments(lab):
    o = Opened(lab, 'odd:5:0')
    assert [(m.call['turn'], m.played, m.step) for m in o.moments] == [(1, 1, 1), (1, 2, 2), (2, 0, 2), (3, 0, 2), (3, 1, 3), (3, 2, 4), (4, 1, 5), (4, 2, 6)]
    assert o.events['error'] == [2, 3]
    problems = [text for k in o.events['error'] for kind,text in told(o, k) if kind == 'problem']
    assert problems[0].startswith('no_call: Your last reply called no tool') and problems[1].startswith('no reply: EndpointDown: the server <b>hung up</b>')
    assert 'tokens unknown, cost unknown' in [*told(o, 0)][-1][1]
    assert room.saw(o, 3) == '(what was sent is not in the trace)' and room.saw(o, 4).startswith('Your last reply called no tool')
    assert 'Your last reply called no tool' in said(shown(o, o.id, 2))
    assert room.timeline(o).axes[0].lines[-1].get_xdata().tolist() == [2, 2]


# Widgets

def test_every_control_of_watch_at_its_ends(lab):
    w = watch(lab, 'expert:1:0')
    o,steps = w.opened,w.opened.moments
    assert (w.slider.min, w.slider.max, w.play.max) == (0, len(steps)-1, len(steps)-1)
    for k in (w.slider.max, 0, w.slider.max//2):
        w.slider.value = k
        m = steps[k]
        assert (picture(w.then) == np.asarray(Image.open(BytesIO(room.png(lab.fork(o.id, m.step).frame(216)))).convert('RGB'))).all()
        assert so_far(o, m.step) in plain(w.score.value) and f'Crafter, step {m.before} of' in w.text.value
    w.slider.value = 0
    w.buttons['◂ turn'].click()
    assert w.slider.value == 0
    w.buttons['turn ▸'].click()
    assert w.moment.call['turn'] == 2 and w.moment.played == 1
    places = [w.buttons['next unlock'].click() or w.slider.value for _ in range(len(o.events['unlock'])+1)]
    after = [k for k in o.events['unlock'] if k > len(steps[0].call['steps'])]
    assert places[0] == after[0] and set(places) == set(o.events['unlock'])
    w.buttons['next error'].click()   # there is none
    assert w.slider.value == places[-1]
    w.buttons['length'].click()
    w.buttons['turn ▸'].click()
    assert w.slider.value == w.slider.max and w.notice.failures == 0


def test_death_has_its_button(lab):
    dead = lab.sql("SELECT episode_id FROM episodes WHERE ended_by = 'death' LIMIT 1").episode_id[0]
    w = watch(lab, dead)
    w.buttons['death'].click()
    assert w.moment.call['steps'][-1]['terminated'] and 'died' in w.said.value


def test_the_mark_moves_on_the_timeline(lab):
    w = watch(lab, 'expert:1:0')
    first = picture(w.line.image)
    w.slider.value = w.slider.max
    changed = np.flatnonzero((first != picture(w.line.image)).any((0, 2)))
    assert {w.line.at(1)-1, w.line.at(200)} <= {*changed.tolist()}


def test_the_code_that_forks_here_does(lab):
    w = watch(lab, 'expert:1:0')
    w.slider.value = 40
    assert w.code.value == ''
    w.fork.value = True
    assert 'lab.fork(' in w.code.value
    names = dict(lab=lab)
    exec(fork_code(w.opened, 40), names)
    assert names['world'].step_count == w.moment.step and 'went on with' in fork_code(w.opened, 40) and '#' not in fork_code(w.opened, w.slider.max)
    w.fork.value = False
    assert w.code.value == ''


def test_the_whole_prompt_waits_until_it_is_asked_for(lab):
    w = watch(lab, 'expert:1:0')
    assert w.sent.value == w.reply.value == ''
    for index,part,word in ((0, w.sent, 'You are playing Crafter'), (1, w.reply, 'finish_reason')):
        w.more.selected_index = index
        assert word in part.value
    w.more.selected_index = None


def test_two_episodes_where_they_part(lab):
    d = lab.diff('expert:1:0', 'random:1:0')
    w = watch(lab, 'expert:1:0', 'random:1:0')
    assert w.slider.value == d.step and repr(d).replace('`', '') in w.head.value
    fig = beside(lab, 'expert:1:0', 'random:1:0')
    for name in ('expert', 'random'): assert f'{d.step} {d.at[f"{name}:1:0"]["action"]}: {d.at[f"{name}:1:0"].effect}'[:40] in said(fig)
    for k in (w.slider.max, 1): w.slider.value = k
    w.buttons['end'].click()
    assert w.slider.value == 200
    short = min(w.pair.two, key=lambda o: o.moments[-1].step)
    assert short.moments[-1].step == 200 or f'over since step {short.moments[-1].step}' in ''.join(t.value for t,*_ in w.sides)
    w.buttons['where they part'].click()
    assert w.slider.value == d.step
    with pytest.raises(WatchError, match='choose one of 1 to 200'): beside(lab, 'expert:1:0', 'random:1:0', 0)
    with pytest.raises(MetricsError, match='different worlds'): watch(lab, 'expert:1:0', 'random:0:0')


def test_an_episode_beside_itself_never_parts(lab):
    w = watch(lab, 'expert:0:0', 'expert:0:0')
    assert w.slider.value == 200 and 'are the same in all their 200 steps' in w.head.value
    assert len({line.get_color() for line in room.lines(w.pair).axes[0].lines}) == 2


def test_an_error_in_a_callback_becomes_visible(lab, monkeypatch):
    w = watch(lab, 'expert:1:0')
    def broken(*_): raise ZeroDivisionError('no <i>picture</i>')
    monkeypatch.setattr(room, 'told', broken)
    w.slider.value = 3
    assert 'ZeroDivisionError: no &lt;i&gt;' in w.notice.value and isinstance(ERRORS.pop(), ZeroDivisionError)
    monkeypatch.undo()
    w.slider.value = 4
    assert w.notice.value == ''


def test_without_a_kernel_there_is_the_figure(lab):
    w = watch(lab, 'expert:1:0')
    w.slider.value = 12
    left,_ = DisplayFormatter().format(w)
    assert left.keys() == {'text/plain', 'image/png'} and left['text/plain'] == "watch('expert:1:0')" and len(str(left)) < 100_000


# What cannot be shown

def test_an_imported_episode_has_words_and_no_picture(lab):
    step = dict(obs=dict(text='x'), tool_calls=[dict(tool='interact_many', args=json.dumps(dict(actions=['noop'])))], reward=0., done=False)
    run, = import_rollout(lab.store, dict(run_id='x', trajectories=[dict(steps=[step], env_id='crafter', policy_id='p')])).runs
    id = lab.sql('SELECT episode_id FROM episodes WHERE run_id = ?', run).episode_id[0]
    assert 'no picture' in said(shown(lab, id, 1)) and 'was imported' in said(shown(lab, id, 1))
    w = watch(lab, id)
    assert 'no picture' in w.score.value and w.notice.failures == 0


def test_a_trace_that_the_game_contradicts_has_pictures_up_to_there(lab, tmp_path):
    lines = (lab.path/'runs'/'expert'/'live').glob('*.jsonl')
    there = tmp_path/'lab'/'runs'/'expert'
    (there/'live').mkdir(parents=True)
    (there/'run.json').write_bytes((lab.path/'runs'/'expert'/'run.json').read_bytes())
    for p in lines: (there/'live'/p.name).write_text(re.sub(r'("step":30,"action":"\w+","effect":"[^"]*","reward":)[-\d.]+', r'\g<1>0.7', p.read_text()))
    o = Opened(Lab(tmp_path/'lab'), 'expert:1:0')
    assert o.sure == 29 and o.world(29).step_count == 29 and o.world(30) is None
    last = o.moments[-1].call['turn']
    assert 'step 30: `reward` was 0.7' in said(shown(o, o.id, last))


def test_an_episode_that_nobody_began(lab):
    agent = dict(model='expert', endpoint='local', difficulty='normal', rng='pure', length=9)
    with lab.store.run('bare', agent, [dict(episode_id='bare:1:0', seed=1, sample=0)]): pass
    with pytest.raises(WatchError, match='it is planned'): watch(lab, 'bare:1:0')


# By hand

def test_a_game_by_hand_is_a_trace_like_any_other(lab):
    game = Session(lab, 1, run_id='hand', length=12, split='train')
    world,deeds = World(1, length=12),['right', 'move_right', 'use', 'do', 'noop', 'move_up', 'do', 'left', 'place_table', 'sleep']
    names = [*map(play_room.canonical, deeds)]
    told_ = game.act(deeds[:3], 'To the tree, $5.')
    for o in deeds[3:]: told_ += game.act(o)
    for o in names: world.step(ACTIONS.index(o))
    assert game.ep.world.state_hash() == world.state_hash() and [a for a,_ in told_] == names
    assert game.act(['noop', 'noop']) and game.over == 'length'
    row = game.finish().row
    told = {k:row[k] for k in ('model', 'endpoint', 'status', 'ended_by', 'steps', 'turns', 'split')}
    assert told == dict(model='human', endpoint='human', status='done', ended_by='length', steps=12, turns=9, split='train')
    assert lab.replay('hand:1:0').exact and (row['input_tokens'], row['cost_usd'], row['unusable']) == (0, 0, 0)
    assert lab.sql("SELECT thought FROM calls WHERE run_id = 'hand' AND turn = 1").thought[0] == 'To the tree, $5.'
    assert not lab.sql("SELECT * FROM calls WHERE run_id = 'hand' AND (cached OR verdict <> 'ok')").shape[0]
    assert 'To the tree, $5.' in said(shown(lab, 'hand:1:0', 1)) and len(film(lab.store, 'hand:1:0', 36)) == 13
    file = lab.filter(models='human', min_achievements=0).write(lab.datasets_path/'human.jsonl')
    assert len(open(file.path).readlines()) > 0 and lab.summary(model='human', split='train').n.iloc[0] == 1
    with pytest.raises(RolloutError, match='is over: length'): game.act('noop')


def test_handed_to_the_expert_it_plays_as_in_a_rollout(lab):
    game = Session(lab, 0, run_id='given', length=200)
    game.hand('expert')
    then,now = (lab.sql('SELECT list("action" ORDER BY step) AS a FROM steps WHERE episode_id = ?', o).a[0] for o in ('expert:0:0', 'given:0:0'))
    assert game.over == 'length' and list(then) == list(now) and lab.replay('given:0:0').exact
    assert lab.sql("SELECT DISTINCT model FROM calls WHERE run_id = 'given'").model.tolist() == ['expert']


def test_who_decided_stands_in_the_trace(lab):
    game = Session(lab, 1, run_id='both', length=60)
    game.act('noop')
    assert len(game.hand('expert', 2)) == 2 and game.ep.turns == 3
    game.act('noop')
    assert lab.sql("SELECT model FROM calls WHERE run_id = 'both' ORDER BY turn").model.tolist() == ['human', 'expert', 'expert', 'human']
    assert game.finish().row['status'] == 'truncated' and game.over == 'truncated' and lab.episode('both:1:0').row['error_type'] == 'Left'
    assert game.finish().row['turns'] == 4 and lab.replay('both:1:0').exact


def test_a_game_goes_on_after_its_kernel_died(lab):
    game = Session(lab, 2, run_id='late', length=30)
    game.act(['move_up', 'do'])
    game.hand('expert', 1)
    then = game.ep.world.state_hash()
    game.writer.close()  # as the kernel's end does
    again = Session(lab, 2, run_id='late', length=30, resume=True)
    assert again.ep.world.state_hash() == then and again.ep.turns == 2
    again.hand('random')
    assert lab.replay('late:2:0').exact
    with pytest.raises(RolloutError, match='is over'): Session(lab, 2, run_id='late', length=30, resume=True)


def test_what_cannot_be_played_is_refused_and_nothing_is_lost(lab):
    game = Session(lab, 1, run_id='wrong', length=9)
    for bad,why in (('slep', 'did you mean `sleep`'), ([], '0 actions'), (['noop']*9, 'give 1 to 8'), ([3], 'not an action')):
        with pytest.raises(RolloutError, match=why): game.act(bad)
    with pytest.raises(Exception, match='expret'): game.hand('expret', 1)
    game.act('noop')
    assert game.ep.turns == 1 and game.finish().row['steps'] == 1
    with pytest.raises(RolloutError, match='did you mean `length`'): Session(lab, 1, lenght=9)
    with pytest.raises(StoreError, match='exists'): Session(lab, 1, run_id='wrong', length=9)


def test_a_key_does_not_reach_the_trace(lab):
    client = SimpleNamespace(secrets=('sk-very-secret-0123456789',), models=None)
    game = Session(lab, 1, client, run_id='keys', length=5)
    game.act('noop', 'my key is sk-very-secret-0123456789')
    game.finish()
    assert not any('very-secret' in p.read_text() for p in (lab.path/'runs'/'keys').rglob('*.jsonl'))


def test_every_button_of_play(lab):
    w = play(lab, 3, run_id='buttons', length=40)
    assert set(w.actions) == set(ACTIONS) and 'expert' in w.model.options
    w.thought.value = 'Once around.'
    for o in ACTIONS: w.actions[o].click()
    assert w.session.ep.world.step_count == len(ACTIONS) and w.thought.value == '' and w.notice.failures == 0
    assert lab.sql("SELECT DISTINCT thought FROM calls WHERE run_id = 'buttons' AND thought IS NOT NULL").thought.tolist() == ['Once around.']
    assert lab.sql("""SELECT "action" FROM steps WHERE run_id = 'buttons' ORDER BY step""").action.tolist() == list(ACTIONS)
    assert w.actions['make_iron_sword'].tooltip.startswith('needs 1 wood') and w.actions['make_iron_sword'].button_style == ''
    for n in (w.turns.min, w.turns.max):
        w.turns.value = n
        w.hand.click()
    assert w.session.over and all(b.disabled for b in (*w.actions.values(), w.hand, w.finish)) and 'It is over' in w.said.value
    assert f'step {w.session.ep.world.step_count} of 40' in said(w.session.figure()) and lab.replay('buttons:3:0').exact


def test_what_can_be_made_now_is_marked(lab):
    w = play(lab, 1, run_id='able', length=200)
    while not w.session.ep.world.inventory.get('wood', 0) >= 2: w.session.hand('expert', 1)
    w.show()
    assert w.actions['make_iron_pickaxe'].button_style == ''
    lacks = play_room.missing(w.session.ep.obs, 'place_table')
    assert (w.actions['place_table'].button_style == 'info') == (not lacks)


def test_errors_of_play_are_shown_and_the_game_goes_on(lab):
    w = play(lab, 1, run_id='sad', length=20)
    w.model.value = 'expret'
    w.hand.click()
    assert 'expret' in w.notice.value and ERRORS.pop()
    w.model.value,w.turns.value = 'expert',1
    w.hand.click()
    assert w.notice.value == '' and w.session.ep.turns == 1
    w.finish.click()
    w.finish.click()
    assert w.session.over == 'truncated' and w.notice.failures == 1


def test_play_without_a_list_of_models(lab):
    class Down:
        models = SimpleNamespace()
        async def _list(self): raise EndpointDown('nothing answers', 'start it')
    down = Down()
    down.models.list = down._list
    assert play(lab, 1, down, run_id='down', length=5).model.options == ()


# The strip

def test_a_strip_shows_the_moments_that_were_asked_for(lab):
    shown_ = film(lab.store, 'expert:1:0', size=90, every=7)
    assert shown_.steps == [*range(0, 200, 7), 200] and len(shown_) == len(shown_.steps)
    row = np.asarray(Image.open(BytesIO(shown_.strip([0, 100, 200]))).convert('RGB'))
    assert row.shape == (90+14, 3*90+2*2, 3)
    for k,step in enumerate((0, 98, 200)):  # 98 is the nearest to 100 that was filmed
        exact = lab.fork('expert:1:0', step).frame(90)
        assert np.abs(row[:90, k*92:k*92+90].astype(int) - exact).mean() < 6
    assert Image.open(BytesIO(shown_.strip(1000))).size[0] == len(shown_)*92 - 2 and Image.open(BytesIO(shown_.strip(1))).size[0] == 90
    with pytest.raises(RolloutError, match='no moments'): shown_.strip([])


def test_a_film_is_saved_by_its_name(lab, tmp_path):
    shown_ = film(lab.store, 'expert:1:0', size=36, every=50)
    assert Image.open(shown_.save(tmp_path/'a.png')).format == 'PNG' and Image.open(shown_.save(tmp_path/'a.gif')).n_frames == 5
    assert len(list(shown_.save(tmp_path/'frames').iterdir())) == 5
