"""How long the reward explorer takes to show a change, at 1,000 episodes; prints one JSON line

Eight runs of 125 episodes of the models in the box. A move is what a slider does: choose the episodes, compute, draw, write the PNG. For each view the milliseconds of CPU, the median of nine
moves; open_ms is the first look, which reads the traces too. The bar is 200."""
import json, tempfile, time
from statistics import median

from synth_lab import Lab

MOVES = 9

def spent(act):
    "CPU milliseconds of `act()`"
    began = time.process_time()
    act()
    return 1e3*(time.process_time()-began)

def moves(explorer, view):
    "The median move of a slider in `view`"
    explorer.controls['view'].value = view
    slider = explorer.controls['episodes']
    found = []
    for k in range(MOVES):
        def move(): slider.value = 1,slider.max-1-k
        found.append(spent(move))
    assert explorer.notice.error is None
    return median(found)

def main(folder):
    lab = Lab(folder, endpoint='local')
    for model,length in (('random', 60), ('expert', 60)):
        for k in range(4): lab.rollout_sync(model, range(125), run_id=f'{model}-{k}', length=length, seed=k, split='eval')
    assert len(lab.episodes) == 1000
    from synth_lab.viz import VIEWS, reward_explorer # by then matplotlib is loaded, as on any later look
    reward_explorer(lab)
    line = dict(open_ms=spent(lambda: reward_explorer(lab)))
    explorer = reward_explorer(lab)
    print(json.dumps({k:round(v) for k,v in (line | {f'{o}_ms':moves(explorer, o) for o in VIEWS}).items()}))

if __name__ == '__main__':
    with tempfile.TemporaryDirectory() as folder: main(folder)
