"""Models larger than a worker: pipelines, shards and what they cost.

python benchmarks/placements.py pipeline --jobs vgg16 transformer --out pipeline.json
python benchmarks/placements.py shards
python benchmarks/placements.py equality
"""

import section_equality
import section_pipeline
import section_shards
from common import arguments, write

SECTIONS = {"pipeline": section_pipeline, "shards": section_shards, "equality": section_equality}


def main() -> None:
    parser = arguments("Placements beside one worker and beside one process.", rounds=3)
    sections = parser.add_subparsers(dest="section", required=True, metavar="SECTION")
    for name, section in SECTIONS.items():
        summary = (section.__doc__ or "").partition("\n")[0]
        section.add_arguments(sections.add_parser(name, help=summary, description=summary))
    options = parser.parse_args()
    results = SECTIONS[options.section].run(options)
    write(options, benchmark=f"placements-{options.section}", results=results)


if __name__ == "__main__":
    main()
