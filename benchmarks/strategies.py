"""Ways to agree, beside their peers and beside what they promise: servers, traffic, stragglers, accuracy.

python benchmarks/strategies.py servers --jobs mlp vgg16 --out servers.json
python benchmarks/strategies.py traffic            (as root: it emulates hosts)
python benchmarks/strategies.py stragglers
python benchmarks/strategies.py accuracy --strategies local-sgd gossip
"""

import section_accuracy
import section_servers
import section_stragglers
import section_traffic
from common import arguments, write

SECTIONS = {
    "servers": section_servers,
    "traffic": section_traffic,
    "stragglers": section_stragglers,
    "accuracy": section_accuracy,
}


def main() -> None:
    parser = arguments("Strategies beside their peers and their formulas.", rounds=3)
    sections = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for name, section in SECTIONS.items():
        summary = (section.__doc__ or "").partition("\n")[0]
        section.add_arguments(sections.add_parser(name, help=summary, description=summary))
    options = parser.parse_args()
    results = SECTIONS[options.section].run(options)
    write(options, benchmark=f"strategies-{options.section}", results=results)


if __name__ == "__main__":
    main()
