"""`fedfactor audit`: how much of the clients' pictures an attacker can recover from their uploads.

The attack is gradient inversion (deep leakage from gradients), as in Section 4.6 of the FedDecomp paper. It starts from
noise and changes the pictures step by step until their gradient resembles the observed one. The similarity is the
cosine over all observed tensors together, the prior is total variation, each step follows the sign of the gradient, and
pictures are clamped to the range of colours. This follows the published code of Geiping et al. (arXiv:2003.14053): its
README and `reconstruction_algorithms.py`. FedDecomp gives no further details, so the number of steps, the step size and
the weight of the prior are settings here. The defaults of that code are 4,000 steps and a total variation weight of
0.0001 over normalised pictures, which for CIFAR-10 is 0.0004 over colours from 0 to 1.

The attacker is the server, or anyone who reads its traffic. The attacker knows the recipe with its seed, the client's
download, the shared part of its upload, the number of pictures and their labels. (The paper does not say whether labels
are known. They can be inferred from the gradient of a few pictures, and an audit should err on the attacker's side.)
The attacker does not know:

- private tensors. It uses their initial values, which are the same on all clients and follow from the seed;
- how many examples of each class the client has (FedRoD). It uses the counts of the known labels;
- the random numbers that the client drew in training. It draws its own.

Tensors that a client keeps but that are not private (the last model in FedAMP and pFedSD) were uploaded before, so the
attacker knows them. Uploaded statistics of batch norms could improve the attack but are not used. If a loss has a
teacher (pFedSD, FedHM), the attack does not differentiate the teacher's output with respect to the pictures.

The state kept as round N is the state after N rounds. The attack targets what each client would upload next:

- `gradient`, the paper's attack: the gradient of the shared weights on a few of the client's pictures, at the tensors
  with which the next round begins. As in training, batch norms use the batch; there is no augmentation.
- `update`: the real next upload, after all local epochs on all the client's data, through optimizer and codec. The
  attack treats the change of the weights as one large gradient of a few pictures. A recovered picture is compared with
  the nearest of the client's pictures of the same class.
"""

from fedfactor.audit.attack import Attack, NothingToAttack, attack_clients, audit
from fedfactor.audit.result import AttackResult, AuditResult

__all__ = ["Attack", "AttackResult", "AuditResult", "NothingToAttack", "attack_clients", "audit"]
