"What the notebook on evaluations should not carry: failures of every kind, judges, what a task app is sent, and the same numbers by another road"
import asyncio, json

import numpy as np, pandas as pd, pytest
from fastapi import FastAPI

from synth_lab import evaluate as ev
from synth_lab.client import AuthError, EndpointDown, ModelNotFoundError
from synth_lab.configs import ConfigError, EvalConfig
from synth_lab.evaluate import choose_seeds, evaluate
from synth_lab.judges import JudgeError
from synth_lab.lab import Lab
from synth_lab.metrics import mean_ci
from synth_lab.policies import init_weights, save_checkpoint
from synth_lab.taskapp import Crafter, create_task_app
from synth_lab.taskclient import AsyncTaskAppClient
from synth_lab.train import read_examples

@pytest.fixture
def lab(tmp_path): return Lab(tmp_path/'lab', 'local')

def config(**more): return EvalConfig(**dict(model='expert', seeds=[1, 0], max_turns=6) | more)

def through(monkeypatch, app, key=None):
    "Let `url=…` mean an app in this process"
    monkeypatch.setattr(ev, 'AsyncTaskAppClient', lambda url=None, key=None, app=app, **_: AsyncTaskAppClient(app=app, key=key))

def answer(asked, reward=2.5, **more):
    "What a task app of somebody else answers: no trace, no seed"
    step = dict(obs={}, tool_calls=[], reward=reward, done=True, truncated=False, info=dict(meta=dict(inference_url='http://a')))
    trajectory = dict(env_id='e', policy_id='p', steps=[step], length=1, inference_url='http://a', final=None)
    return dict(run_id=asked['run_id'], trajectories=[trajectory], metrics=dict(episode_returns=[reward], mean_return=reward, num_steps=1)) | more

def stub(play):
    "A task app that answers with what `play` makes of a request"
    app = FastAPI()
    @app.get('/health')
    def health(): return dict(healthy=True)
    @app.post('/rollout')
    async def rollout(asked:dict): return await play(asked)
    return app

# The table

def test_a_row_a_seed_in_the_order_asked_for_and_nothing_clamped(lab):
    e = evaluate(lab, config(seeds=[4, 1, 0], max_turns=10, concurrency=3))
    assert e.rows.seed.tolist() == [4, 1, 0] and e.rows.achievements.tolist() == [4, 12, 2] and e.failed == 0
    mine = lab.episodes.set_index('seed').loc[[4, 1, 0]]
    assert e.rows['return'].tolist() == mine['return'].tolist() and e.rows.episode_id.tolist() == mine.episode_id.tolist()
    s,by_hand = e.summary,mean_ci([4, 12, 2], [4, 1, 0])
    assert (s['n'], s['errors'], s['mean_achievements'], s['achievements_lo']) == (3, 0, 6., pytest.approx(by_hand.lo))
    text = str(e)
    assert '| 1 | done | 12 |' in text and '6.00' in text and '{' not in text

def test_each_seed_is_told_as_it_ends(lab, monkeypatch):
    told = []
    evaluate(lab, config(), on_row=told.append)
    assert sorted(o['seed'] for o in told) == [0, 1] and {o['status'] for o in told} == {'done'}
    through(monkeypatch, create_task_app('crafter'))
    there = []
    evaluate(lab, config(), url='http://a', on_row=there.append)
    assert {o['seed']:o['achievements'] for o in there} == {o['seed']:o['achievements'] for o in told}

def test_a_seed_that_fails_is_a_row_and_no_zero(lab):
    class Flaky(Crafter):
        id = 'flaky'
        def new(self, seed, config):
            if seed == 1: raise RuntimeError('closed | for\ntoday')
            return super().new(seed, config)
    e = evaluate(lab, config(seeds=[0, 1, 2]), task=Flaky())
    bad = e.rows.set_index('seed').loc[1]
    assert (e.failed, bad.status, pd.isna(bad['return']), 'closed' in bad.error) == (1, 'error', True, True)
    assert e.summary['n'] == 2 and e.summary['errors'] == 1 and e.summary['mean_achievements'] == e.rows.achievements.dropna().mean()
    assert len(str(e).splitlines()) == len([o for o in str(e).splitlines() if o.startswith(('|', '**'))]) + 2 # the error broke no line

def test_when_all_fail_there_is_a_table_without_means(lab):
    class Closed(Crafter):
        id = 'closed'
        def new(self, seed, config): raise RuntimeError('closed')
    e = evaluate(lab, config(), task=Closed())
    assert (e.failed, e.runs, e.summary['errors'], 'mean_return' in e.summary) == (2, [], 2, False) and 'closed' in str(e)

def test_a_model_that_is_not_there_is_an_error_with_the_nearest(lab):
    with pytest.raises(ModelNotFoundError, match='expert'): evaluate(lab, config(model='expret'))

def test_an_address_a_key_and_a_task_that_are_wrong(lab, monkeypatch):
    with pytest.raises(EndpointDown, match='task-app serve'): evaluate(lab, config(), url='http://127.0.0.1:1')
    with pytest.raises(ev.LabError, match='did you mean `crafter`'): evaluate(lab, config(), task='craftr')
    with pytest.raises(ConfigError, match='env_name'): evaluate(lab, config(env_name='chess'))
    through(monkeypatch, create_task_app('crafter', key='right'))
    with pytest.raises(AuthError, match='ENVIRONMENT_API_KEY'): evaluate(lab, config(), url='http://a', key='wrong')
    assert evaluate(lab, config(), url='http://a', key='right').failed == 0

def test_a_task_app_that_a_file_names_is_asked(lab, monkeypatch):
    through(monkeypatch, create_task_app('crafter'))
    assert evaluate(lab, config(task_app_url='http://127.0.0.1:8001')).runs[0].startswith('import-')
    assert evaluate(lab, config(task_app_url='https://your-app.modal.run')).runs[0].startswith('run_')

def test_what_the_notes_say(lab):
    e = evaluate(lab, config(model='qwen/qwen3-32b', trace_format='full', seeds=[0]))
    assert e.model == 'expert' and set(lab.episodes.model) == {'expert'}
    assert 'in its place' in ' '.join(e.notes) and 'trace_format' in ' '.join(e.notes)

# The same game by both roads

def test_a_task_app_plays_what_the_lab_plays(lab, monkeypatch):
    through(monkeypatch, create_task_app('crafter'))
    here,there = evaluate(lab, config(max_turns=10)),evaluate(lab, config(max_turns=10), url='http://a')
    assert here.rows.achievements.tolist() == there.rows.achievements.tolist() and there.rows['return'].tolist() == there.rows.achievements.tolist()
    assert len(there.runs) == 1 and lab.sql('SELECT split FROM episodes WHERE run_id = ?', there.runs[0]).split.unique().tolist() == ['train']

def test_the_second_reward_of_turns_is_the_same_by_both_roads(lab, monkeypatch):
    through(monkeypatch, create_task_app('crafter'))
    for rewards in (dict(strategy='consistent', indicator_lambda=.5), dict(strategy='per_achievement', weights=dict(collect_wood=3.))):
        c = config(seeds=[1], env_config=dict(step_rewards=dict(enabled=True, mode='decision_stepwise', **rewards)))
        q = "SELECT seed, turn, value FROM rewards JOIN episodes USING (run_id, episode_id) WHERE name = 'stepwise' AND run_id = ? ORDER BY seed, turn"
        found = [lab.sql(q, evaluate(lab, c, **how).runs[0]) for how in ({}, dict(url='http://a'))]
        assert found[0].equals(found[1]) and found[0].value.sum() > 0

@pytest.mark.parametrize('how', [{}, dict(url='http://a')])
def test_traces_can_be_filtered_and_learned_from(lab, monkeypatch, tmp_path, how):
    through(monkeypatch, create_task_app('crafter'))
    evaluate(lab, config(seeds=[1, 2]), **how)
    made = lab.filter(min_achievements=5, splits='train').write(tmp_path/'a.jsonl')
    assert made.rows == 6 and len(read_examples(made.path).y) > 6

# What a task app is sent

def asked_of(lab, monkeypatch, c, **how):
    "The requests of an evaluation"
    seen = []
    async def play(asked):
        seen.append(asked)
        return answer(asked)
    through(monkeypatch, stub(play))
    return seen,evaluate(lab, c, url='http://a', **how)

def test_a_request_says_all_that_the_configuration_says(lab, monkeypatch):
    c = config(seeds=[7], max_turns=3, env_name='crafter', policy_name='crafter-react', trace_format='full', env_config=dict(difficulty='easy'),
        policy_config=dict(temperature=.2, trace_correlation_id='c'))
    (asked,),_ = asked_of(lab, monkeypatch, c)
    assert asked['env'] == dict(env_name='crafter', seed=7, config=dict(difficulty='easy', split='train', index=7))
    assert asked['policy'] == dict(policy_name='crafter-react',
        config=dict(model='expert', provider='local', temperature=.2, trace_correlation_id='c', max_llm_calls=3))
    assert (asked['ops'], asked['on_done'], asked['mode'], asked['record']) == (['agent', 'env']*3, 'terminate', 'eval',
        dict(return_trace=True, trace_format='full'))

def test_a_model_elsewhere_is_asked_where_the_lab_asks(tmp_path, monkeypatch):
    there = dict(provider='groq', inference_url='https://api.groq.com/openai')
    for endpoint,url in (('groq', there['inference_url']), ('openai', 'https://api.openai.com/v1')):
        (asked,),_ = asked_of(Lab(tmp_path/endpoint, endpoint), monkeypatch, config(model='qwen/qwen3-32b', seeds=[1], policy_config=there))
        sent = asked['policy']['config']
        assert (sent['inference_url'], sent['provider'], sent['model']) == (url, endpoint, 'qwen/qwen3-32b')

def test_a_task_app_of_somebody_else_need_not_know_our_traces(lab, monkeypatch):
    _,e = asked_of(lab, monkeypatch, config(seeds=[5, 3]))
    assert e.rows['return'].tolist() == [2.5, 2.5] and e.failed == 0 and e.summary['mean_return'] == 2.5

def test_no_more_rollouts_at_once_than_said(lab, monkeypatch):
    most,now = 0,0
    async def play(asked):
        nonlocal most,now
        now += 1
        most = max(most, now)
        await asyncio.sleep(.01)
        now -= 1
        return answer(asked)
    through(monkeypatch, stub(play))
    evaluate(lab, config(seeds=range(10), concurrency=3), url='http://a')
    assert most == 3

def test_what_was_played_is_kept_when_the_caller_ends_it(lab, monkeypatch):
    def stop(row):
        if row['seed'] == 2: raise ValueError('enough')
    async def play(asked):
        if asked['env']['seed'] == 3: await asyncio.sleep(60)
        return answer(asked)
    through(monkeypatch, stub(play))
    with pytest.raises(ValueError, match='enough'): evaluate(lab, config(seeds=[0, 1, 2, 3]), url='http://a', on_row=stop)
    assert lab.episodes.seed.tolist() == [0, 1, 2]

# Which worlds

TASKS = pd.DataFrame(dict(seed=[3, 5, 8], split='train', difficulty=['easy', 'Hard', 'easy'], trees=[1, 2, 3]))

@pytest.mark.parametrize('how,seeds', [({}, [3, 5, 8]), (dict(metadata=dict(difficulty='EASY')), [3, 8]),
    (dict(metadata=dict(difficulty='easy', trees='3')), [8]), (dict(sql='SELECT seed FROM tasks WHERE trees > 1 ORDER BY trees DESC'), [8, 5]),
    (dict(sql='SELECT max(seed) FROM tasks'), [8]), (dict(metadata=dict(difficulty='easy'), sql='SELECT * FROM tasks WHERE trees < 3'), [3])])
def test_seeds_by_what_their_tasks_say(how, seeds): assert choose_seeds(TASKS, **how) == seeds

@pytest.mark.parametrize('how,why', [(dict(metadata=dict(dificulty='easy')), 'did you mean `difficulty`'), (dict(metadata=dict(trees=9)), 'there is 1, 2, 3'),
    (dict(sql='SELECT'), 'the columns of `tasks`'), (dict(sql='SELECT seed FROM tasks WHERE trees > 9'), 'chooses no seed')])
def test_seeds_that_nothing_says(how, why):
    with pytest.raises(ConfigError, match=why): choose_seeds(TASKS, **how)

def test_worlds_are_chosen_the_same_way_by_both_roads(lab, monkeypatch):
    through(monkeypatch, create_task_app('crafter'))
    c = config(seeds=range(6), max_turns=1, metadata_sql='SELECT seed FROM tasks WHERE trees >= 3 ORDER BY seed')
    assert evaluate(lab, c).rows.seed.tolist() == evaluate(lab, c, url='http://a').rows.seed.tolist() == [1, 3, 4]

# Judges

def judged(tmp_path, text, toml):
    (tmp_path/'j').mkdir()
    (tmp_path/'j/style.py').write_text(text)
    (tmp_path/'j/eval.toml').write_text('[eval]\nmodel = "expert"\nseeds = "0-4"\nmax_turns = 6\n' + toml)
    return EvalConfig.load(tmp_path/'j/eval.toml')

def test_a_judge_beside_the_configuration_has_a_column_a_mean_and_a_correlation(lab, tmp_path):
    c = judged(tmp_path, "def judge(p, scale): return scale*p['metrics']['n_achievements']", '[eval.judge]\npath = "style.py"\nname = "style"\nscale = 0.1\n')
    e = evaluate(lab, c)
    assert np.allclose(e.rows['style'].astype(float), e.rows.achievements.astype(float)/10)
    said = e.judges['style']
    assert said['n'] == 5 and said['mean'] == pytest.approx(e.rows.achievements.mean()/10) and said['r'] > .99 and 'style: mean' in str(e)

def test_several_judges_and_one_that_fails(lab, tmp_path):
    c = judged(tmp_path, "def good(p): return 1\ndef bad(p): raise RuntimeError('no idea')\n",
        '[eval.judge.good]\npath = "style.py"\ncallable = "good"\n[eval.judge.bad]\npath = "style.py"\nfunction = "bad"\n')
    e = evaluate(lab, c)
    assert e.judges['good']['mean'] == 1 and e.judges['bad']['failed'] == 5 and 'no idea' in str(e) and e.rows['bad'].isna().all()

def test_a_judge_that_is_not_there_ends_it_before_anything_is_played(lab, tmp_path):
    with pytest.raises(JudgeError, match='style.py'): evaluate(lab, config(judge=dict(path='style.py')))
    assert not len(lab.store.rows('SELECT * FROM runs'))

# Models of the lab

def test_a_model_from_rl_is_promoted_by_who_evaluates_it(lab):
    save_checkpoint(lab.models_path, 'rl:student:job_one', init_weights(8, 0), base='student', promoted=False)
    e = evaluate(lab, config(model='rl:some:where', seeds=[0], max_turns=1))
    assert e.model == 'rl:student:job_one' and e.failed == 0 and [o for o in e.notes if 'was promoted' in o]
    assert not [o for o in evaluate(lab, config(model=e.model, seeds=[0], max_turns=1)).notes if 'promoted' in o]

def test_a_checkpoint_of_the_lab_plays_a_task_of_ones_own_too(lab):
    class Mine(Crafter): id = 'mine'
    save_checkpoint(lab.models_path, 'ft:student:job_one', init_weights(8, 0), base='student')
    e = evaluate(lab, config(model='ft:student:job_one', max_turns=2), task=Mine())
    assert e.failed == 0 and set(lab.episodes.model) == {'ft:student:job_one'}

def test_a_row_is_plain_enough_for_json(lab):
    e = evaluate(lab, config(seeds=[0], max_turns=1))
    assert json.loads(e.rows.to_json(orient='records'))[0]['seed'] == 0 and json.loads(json.dumps(e.summary))['n'] == 1
