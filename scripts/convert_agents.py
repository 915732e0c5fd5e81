"""
Convert published agents from an earlier file format to the current one::

    python scripts/convert_agents.py rl-trained-agents --old-python /path/to/old/env/bin/python

The interpreter of the old environment reads each file, so that no code for old formats is needed here. The new file
replaces the old one if it has the same networks and predicts the same actions for 1,000 observations.
"""

import argparse
import pickle
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from sb3_td3x import TD3X
from sb3_td3x.agents.publish import write_networks

# Runs in the old environment, with the paths of the agent and of the result as arguments
_READ = """
import copy, pickle, sys, zipfile, json
import numpy as np
from sb3_td3x import TD3X

model = TD3X.load(sys.argv[1], device="cpu")
space = copy.deepcopy(model.observation_space)
space.seed(0)
observations = np.stack([space.sample() for _ in range(1000)])
with zipfile.ZipFile(sys.argv[1]) as archive:
    attributes = {name: getattr(model, name) for name in json.loads(archive.read("data"))}
actions, _ = model.predict(observations, deterministic=True)
content = (attributes, model.get_parameters(), observations, actions)
with open(sys.argv[2], "wb") as file:
    pickle.dump(content, file)
"""


def convert(path: Path, old_python: str) -> None:
    """
    Convert an agent.

    :raises ValueError: the new file would predict other actions
    """
    with tempfile.TemporaryDirectory() as folder:
        content, whole, new = (Path(folder, name) for name in ("content.pkl", "whole.zip", "new.zip"))
        subprocess.run([old_python, "-c", _READ, str(path.resolve()), str(content)], check=True, cwd=folder)
        attributes, parameters, observations, expected = pickle.loads(content.read_bytes())
        model = TD3X(attributes["policy_class"], env=None, device="cpu", _init_setup_model=False)
        vars(model).update(attributes)
        model._setup_model()
        model.set_parameters(parameters, device="cpu")
        model.save(whole)
        write_networks(whole, new)
        converted = TD3X.load(new, device="cpu")
        actions, _ = converted.predict(observations, deterministic=True)
        networks = converted.get_parameters()["policy"]
        is_same = all(np.array_equal(networks[name], tensor) for name, tensor in parameters["policy"].items())
        # Matrix products may be rounded differently, depending on where the batch lies in memory
        if not is_same or not np.allclose(actions, expected, rtol=0, atol=1e-6):
            raise ValueError(f"{path} would predict other actions after the conversion")
        shutil.copyfile(new, path)


def main() -> None:
    """Convert all agents in a folder and its subfolders."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the folder of the agents")
    parser.add_argument("--old-python", required=True, help="interpreter of an environment with the old version")
    args = parser.parse_args()
    for path in sorted(args.folder.rglob("*.zip")):
        convert(path, args.old_python)
        print(f"{path}: converted, the same actions for 1,000 observations")


if __name__ == "__main__":
    main()
