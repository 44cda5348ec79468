"""A classifier of scikit-learn: its layers act in every client, without any extra.

python examples/own_models/sklearn_mlp.py ROOT
"""

import sys

import numpy as np
from sklearn.neural_network import MLPClassifier

from headrace import ActionRule, ShardReader, publish_mlp


def main(root):
    with ShardReader(root, policy_id="default", batch_size=1_000_000) as reader:
        batch = reader.next()
        learned = reader.ledger
    model = MLPClassifier((16,), activation="relu", max_iter=50, random_state=1)
    weights = batch["rewards"] / np.exp(batch["action_logp"])  # the log's other actions count too
    model.fit(batch["obs"], batch["actions"], sample_weight=np.maximum(weights, 0))
    layers = [
        (weight.T, bias) for weight, bias in zip(model.coefs_, model.intercepts_, strict=True)
    ]
    if len(model.classes_) == 2:  # one output, the logit of the second class against 0
        weight, bias = layers[-1]
        layers[-1] = np.vstack([0 * weight, weight]), np.concatenate([[0.0], bias])
    rule = ActionRule("sample", explore=0.05)
    return publish_mlp(root, layers, activation="relu", action_rule=rule, lineage=learned)


if __name__ == "__main__":
    print(main(sys.argv[1]))
