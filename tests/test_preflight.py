"""What a lesson on preflights should not carry: templates of every habit, groups of every kind."""
import json

import numpy as np, pandas as pd, pytest

from synth_lab.preflight import CHATML, PreflightError, _jinja, _unmarked, preflight_grpo, preflight_sft
from synth_lab.rows import DIALECTS, RowError
from synth_lab.tools import interact_many


def call(n, *actions): return dict(id=f'c{n}', type='function', function=dict(name='interact_many', arguments=json.dumps(dict(actions=actions))))


def talk(turns, **last):
    "A conversation of so many turns, each with a thought and a call"
    messages = [dict(role='system', content='You play Crafter.')]
    for n in range(turns):
        messages += [dict(role='user', content=f'step {n}'), dict(role='assistant', content=f'<think>plan {n}</think>', tool_calls=[call(n, 'do')])]
        if n < turns-1: messages.append(dict(role='tool', tool_call_id=f'c{n}', content='Done: do.'))
    messages[-1] |= last
    return dict(messages=messages, tools=[interact_many(8)])


@pytest.fixture
def put(tmp_path):
    def put(*rows, dialect='openai'):
        (tmp_path/'d.jsonl').write_text(''.join(json.dumps(DIALECTS[dialect].row(r)) + '\n' for r in rows))
        return tmp_path/'d.jsonl'
    return put


def found(report): return [(p.line, p.path, p.reason.split(':')[0]) for p in report.problems]


PREFIX, LATER = 'the prompt alone is not the beginning of prompt and answer', 'what was said is rendered differently once more follows'
DROPS, MASK = 'the template drops what the answer says', 'the mask is empty'
FORGETFUL = CHATML.replace("{{- m.content or '' }}", "{{- (m.content or '') if loop.last else (m.content or '').split('</think>')[-1] }}")
NO_CALLS = CHATML.replace('in m.tool_calls or []', 'in []')
UNMARKED = CHATML.replace('{%- generation %}\n', '').replace('{%- endgeneration %}\n', '')
EMPTY_MASK = UNMARKED.replace("{{- m.content or ''", "{%- generation %}{%- endgeneration %}{{- m.content or ''")
COUNTS = CHATML.replace("{{- '<|im_start|>' + m.role", "{{- (messages|length)|string + m.role")


@pytest.mark.parametrize('template, problems', [
    (CHATML, []), (UNMARKED, []), (None, []),
    (FORGETFUL, [('messages[2]', LATER), ('messages[5]', LATER), ('messages[2]', DROPS), ('messages[5]', DROPS)]),
    (NO_CALLS, [(f'messages[{n}]', 'the call of `interact_many` is not in what is learned') for n in (2, 5, 8)]),
    (EMPTY_MASK, [*((f'messages[{n}]', 'the call of `interact_many` is not in what is learned') for n in (2, 5, 8)), ('messages[2]', MASK)])])
def test_each_habit_of_a_template_is_named_with_its_place(put, template, problems):
    "Past thoughts that are stripped, calls that are left out, masks that hold nothing"
    assert found(preflight_sft(put(talk(1), talk(3)), template))[-len(problems) or 2:] == [(2, *o) for o in problems]


def test_the_first_difference_is_shown(put):
    p = preflight_sft(put(talk(2)), FORGETFUL).problems[0]
    assert p.line == 1 and "'hink>plan 0</think><tool'" not in p.fix and 'character' in p.reason and "'think>plan 0" in p.reason.replace('hink', 'think', 1).replace('tthink', 'think')


def test_a_prompt_that_changes_is_not_a_prefix(put):
    assert (1, 'messages[2]', PREFIX) in found(preflight_sft(put(talk(1)), COUNTS))


def test_rows_of_one_turn_forgive_a_forgetful_template(put):
    "What was thought in the row's own answer is kept, so there is nothing to complain of"
    assert preflight_sft(put(*[talk(1)]*3), FORGETFUL).ok


@pytest.mark.parametrize('dialect', DIALECTS)
def test_the_same_faults_in_every_dialect(put, dialect):
    r = preflight_sft(put(talk(1), talk(2), dialect=dialect), FORGETFUL, dialect)
    assert {(line, reason) for line,_,reason in found(r)} == {(2, LATER), (2, DROPS)}
    assert r.problems[0].path == ('completion[0]' if dialect == 'trl' else 'messages[2]')


def test_a_function_is_a_template(put):
    plain = lambda messages: ''.join(f'{m["role"]}: {m.get("content") or ""}{json.dumps(m.get("tool_calls") or "")}\n' for m in messages)
    last_only = lambda messages: plain(messages[-1:])
    assert preflight_sft(put(talk(2)), plain).ok
    assert {reason for _,_,reason in found(preflight_sft(put(talk(2)), last_only))} >= {PREFIX, LATER}


def test_a_tokenizer_brings_its_template_and_counts(put):
    class Tokenizer:
        chat_template, special_tokens_map = '{{ bos_token }}' + CHATML, dict(bos_token='<s>')
        def encode(self, text): return text.split()
    r = preflight_sft(put(talk(1)), Tokenizer())
    text = '<s>' + _unmarked(_jinja(CHATML)(json.loads(json.dumps(DIALECTS['trl'].row(talk(1))))['prompt'], talk(1)['tools'], False))[0]
    assert r.ok and r.figures['tokens of the longest row'] > len(text.split()) and r.figures['share of tokens that is learned'] < .5


def test_rows_longer_than_the_trainer_takes(put):
    r = preflight_sft(put(talk(1), talk(40)), max_length=1024)
    assert [(p.line, p.reason[:29]) for p in r.problems] == [(2, 'longer than 1024 tokens: 1536')] or r.problems[0].reason.startswith('longer than 1024 tokens')
    assert len(r.problems) == 1 and 'cut off' in r.problems[0].reason


def test_a_large_file_is_sampled_and_says_so(put):
    r = preflight_sft(put(*[talk(1)]*50), sample=7)
    assert (r.rows, r.figures['rows looked at']) == (50, 7) and '| rows looked at | 7 |' in r._repr_markdown_()


def test_what_cannot_be_rendered_is_a_problem_of_its_line(put):
    path = put(talk(1), dict(messages=[dict(role='user', content='x'), dict(role='assistant', content='y', weight=0)]))
    assert [(p.line, 'nothing to learn' in p.reason) for p in preflight_sft(path).problems] == [(2, True)]
    strict = CHATML.replace('{%- for m in messages %}', "{%- for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system, please') }}{% endif %}")
    assert 'no system, please' in preflight_sft(put(talk(1)), strict).problems[0].reason
    path.write_text('{"messages"\n[]\n')
    assert [p.line for p in preflight_sft(path).problems] == [1, 2]


def test_templates_run_in_a_sandbox(put):
    spy = "{{ messages.__class__.__mro__[1].__subclasses__() }}" + CHATML
    assert 'cannot be rendered' in preflight_sft(put(talk(1)), spy).problems[0].reason


@pytest.mark.parametrize('template, says', [('{% for %}', 'template'), (3, 'int is no chat template')])
def test_what_is_no_template_is_an_error(put, template, says):
    with pytest.raises(PreflightError, match=says): preflight_sft(put(talk(1)), template)


def test_files_and_dialects_that_are_not_there(put, tmp_path):
    with pytest.raises(RowError, match='is not a file'): preflight_sft(tmp_path/'none.jsonl')
    with pytest.raises(RowError, match='`openai`'): preflight_sft(put(talk(1)), dialect='opnai')
    (tmp_path/'empty.jsonl').write_text('')
    assert [p.reason for p in preflight_sft(tmp_path/'empty.jsonl').problems] == ['the file is empty']


# Groups

def played(*groups, **columns):
    "Episodes with these returns, a world each"
    return pd.DataFrame([dict(run_id='r', seed=s, status='done', steps=10*(i+1), **columns) | {'return': r} for s,g in enumerate(groups) for i,r in enumerate(g)])


@pytest.mark.parametrize('rewards, flat', [
    ([.5]*4, True), ([1, 1, 1+1e-9], True), ([.1+.2, .3], True), ([0, 0, 1], False), ([0, 1e-5], False), ([-1e9, -1e9], True)])
def test_a_group_without_spread(rewards, flat):
    "Not by its mean, and not by a standard deviation of exactly 0"
    assert preflight_grpo(played(rewards, [0, 1])).figures['share of groups without spread'] == (.5 if flat else 0)


def test_every_figure():
    e = pd.concat([played([0, 0, 0], [1, 1, 1], [0, 1, 1], [0, .5, 1], [.25]), pd.DataFrame([
        dict(run_id='r', seed=0, status='error', steps=3), dict(run_id='r', seed=2, status='truncated', steps=500) | {'return': .0}])], ignore_index=True)
    f = preflight_grpo(e).figures
    assert (f['episodes'], f['left out: they failed or have no reward'], f['groups'], f['groups of one episode'], f['smallest group'], f['largest group']) == (14, 1, 5, 1, 3, 4)
    assert (f['share of groups without spread'], f['of these, all as bad as the worst episode'], f['of these, all as good as the best']) == (.5, 1, 1)
    assert f['share of pairs that are tied'] == pytest.approx((3 + 3 + 2 + 0)/(3+3+6+3)) and f['share of episodes cut short'] == 1/14
    assert (f['steps of the longest'], f['steps of an episode, median']) == (500, 20)


def test_ties_by_another_road():
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 4, rng.integers(2, 9)).astype(float) for _ in range(40)]
    g = preflight_grpo(played(*groups)).groups
    assert g.different.tolist() == [len(set(o)) for o in groups] and g['size'].tolist() == [len(o) for o in groups]
    assert g.tied.tolist() == pytest.approx([np.mean([a == b for i,a in enumerate(o) for b in o[i+1:]]) for o in groups])


def test_groups_of_two_runs_are_not_mixed():
    e = pd.concat([played([0, 0]), played([1, 1]).assign(run_id='s')])
    assert preflight_grpo(e).figures['share of groups without spread'] == 1


def test_another_reward_and_tolerance():
    e = played([1, 2], [3, 3]).assign(n_achievements=[1, 1, 1, 2])
    assert preflight_grpo(e, 'n_achievements').groups.different.tolist() == [1, 2]
    assert preflight_grpo(e, tolerance=1).groups.different.tolist() == [1, 1]


def test_advice_fits_the_figures():
    assert len(preflight_grpo(played([0, 1, 2], [0, 2, 3])).advice) == 0
    assert ['group_size' in o for o in preflight_grpo(played([0, 1], [2])).advice] == [True]
    assert 'groups teach nothing' in preflight_grpo(played([0, 0], [1, 1], [0, 1])).advice[0]


@pytest.mark.parametrize('episodes, says', [
    (played([1], [2]), 'group_size=8'), (played([1, 2]).assign(status='error'), 'no two finished'), (played([1, 2]).rename(columns={'return': 'retrun'}), 'did you mean `retrun`')])
def test_nothing_to_compare_is_an_error(episodes, says):
    with pytest.raises(PreflightError, match=says): preflight_grpo(episodes)


def test_episodes_of_a_lab_are_what_it_takes(tmp_path):
    from synth_lab.traces import Store
    store = Store(tmp_path/'lab')
    planned = [dict(episode_id=f'g:{s}:{k}', seed=s, sample=k) for s in (0, 1) for k in (0, 1)]
    with store.run('g', dict(model='m', endpoint='local', split='train', difficulty='normal', rng='pure', length=10), planned) as w:
        for p in planned:
            w.write('episode', episode_id=p['episode_id'], attempt=1, started_at='2026-01-31T12:00:00.000Z')
            if p['episode_id'] != 'g:1:1': w.write('episode_end', episode_id=p['episode_id'], attempt=1, status='done', achievements=[], steps_played=5, **{'return': float(p['sample'])})
    r = preflight_grpo(store.sql('SELECT * FROM episodes'))
    assert (r.figures['groups'], r.figures['groups of one episode'], r.figures['left out: they failed or have no reward']) == (2, 1, 1)
