"""Ways to agree, beside their peers and beside what they promise: servers, traffic, hiding, stragglers, accuracy.

python benchmarks/strategies.py servers --jobs mlp vgg16
python benchmarks/strategies.py traffic            (as root: it emulates hosts)
python benchmarks/strategies.py hiding             (as root)
python benchmarks/strategies.py stragglers
python benchmarks/strategies.py accuracy --strategies local-sgd gossip
"""

import section_accuracy
import section_hiding
import section_servers
import section_stragglers
import section_traffic
from common import run_section

SECTIONS = {
    "servers": section_servers,
    "traffic": section_traffic,
    "hiding": section_hiding,
    "stragglers": section_stragglers,
    "accuracy": section_accuracy,
}

if __name__ == "__main__":
    run_section("Strategies beside their peers and their formulas.", "strategies", SECTIONS)
