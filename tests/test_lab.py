"The door: endpoints keep their names and keys, whatever the environment moved"
import pytest

from synth_lab import Lab, LabError


@pytest.fixture
def lab_at(tmp_path): return lambda **how: Lab(tmp_path/'lab', **how)


def test_a_moved_endpoint_keeps_its_name_and_its_key(lab_at, monkeypatch):
    monkeypatch.setenv('SYNTH_BASE_URL', 'http://myhost:7000/api')
    monkeypatch.setenv('SYNTH_API_KEY', 'the-key-of-synth')
    monkeypatch.setenv('OPENAI_API_KEY', 'the-key-of-openai')
    client = lab_at(endpoint='synth').client
    assert (client.endpoint.name, client.endpoint.url, client.endpoint.key) == ('synth', 'http://myhost:7000/api', 'SYNTH_API_KEY')
    assert 'the-key-of-openai' not in str(vars(client))


def test_the_url_of_the_environment_is_openai_s_own(lab_at, monkeypatch):
    monkeypatch.setenv('OPENAI_BASE_URL', 'http://127.0.0.1:8000/v1')
    lab = lab_at()
    assert lab.client.endpoint == lab.endpoint and lab.endpoint.url == 'http://127.0.0.1:8000/v1'
    assert lab.client.endpoint.name != 'local'


def test_a_moved_local_endpoint_is_no_longer_in_process(lab_at, monkeypatch):
    monkeypatch.setenv('LOCAL_BASE_URL', 'http://127.0.0.1:8765/v1')
    assert not lab_at(endpoint='local').client.endpoint.in_process


def test_the_box_serves_the_checkpoints_of_this_lab(lab_at):
    from synth_lab.policies import init_weights, save_checkpoint
    lab = lab_at(endpoint='local')
    save_checkpoint(lab.models_path, 'ft:student:job_12345678', init_weights(8))
    assert 'ft:student:job_12345678' in [o.id for o in lab.client.models.list()]
    assert lab.newest('ft') == 'ft:student:job_12345678'


@pytest.mark.parametrize('where, said', [(dict(split='evl'), "no episode has split 'evl' → did you mean `eval`"), (dict(splt='eval'), 'did you mean `split`')])
def test_a_misspelt_question_is_answered_with_the_nearest_name(lab_at, where, said):
    lab = lab_at(endpoint='local')
    lab.rollout_sync('random', [1], length=5, split='eval')
    with pytest.raises(LabError, match=said): lab.summary(**where)


def test_processes_share_a_run_of_the_models_in_the_box(lab_at):
    lab = lab_at(endpoint='local')
    alone, shared = (lab.rollout_sync('expert', range(4), length=30, run_id=f'with-{n}', processes=n).episodes for n in (1, 2))
    assert shared.status.tolist() == ['done']*4 and shared.final_hash.tolist() == alone.final_hash.tolist()
    assert len(set(lab.sql("SELECT segment FROM segments WHERE run_id = 'with-2' AND lines > 1").segment)) == 2


@pytest.mark.parametrize('word, way_out', [('max_steps', 'it is called `length`'), ('max_turn', 'did you mean `max_turns`'), ('client', '')])
def test_a_keyword_that_a_rollout_has_not_is_named(lab_at, word, way_out):
    with pytest.raises(LabError, match=f'no keyword `{word}`.*{way_out}'): lab_at(endpoint='local').rollout_sync('random', [0], **{word: 3})

def test_a_lab_shows_what_is_in_it(tmp_path):
    lab = Lab(tmp_path/'lab', endpoint='local')
    assert 'No episodes yet' in lab._repr_markdown_() and "rollout('expert'" in lab._repr_markdown_()
    for model in ('random', 'expert'): lab.rollout_sync(model, range(2), length=20)
    lab.rollout_sync('random', [5], length=10)
    rows = [o.split(' | ') for o in lab._repr_markdown_().splitlines() if o.startswith('| `')]
    assert [o[:4] for o in rows] == [['| `expert`', '1', '2', '0'], ['| `random`', '2', '3', '0']]
    assert [o[4].split(' ')[0] for o in rows] == [f'{lab.episodes[lab.episodes.model == m].n_achievements.mean():.2f}' for m in ('expert', 'random')]

def test_the_widgets_of_a_lab_look_at_this_lab(tmp_path):
    lab = Lab(tmp_path/'lab', endpoint='local')
    lab.rollout_sync('random', range(2), length=20, run_id='r')
    assert len(lab.explore().episodes) == 2 and lab.watch('r:0:0').opened.row['episode_id'] == 'r:0:0'
    console = lab.play(3)
    console.session.act(['noop'])
    console.session.finish()
    assert lab.sql("SELECT seed, model, steps FROM episodes WHERE model = 'human'").values.tolist() == [[3, 'human', 1]]
