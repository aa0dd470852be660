"""Models larger than a worker: pipelines, shards and what they cost.

python benchmarks/placements.py pipeline --jobs vgg16 transformer
python benchmarks/placements.py shards
python benchmarks/placements.py equality
"""

import section_equality
import section_pipeline
import section_shards
from common import run_section

SECTIONS = {"pipeline": section_pipeline, "shards": section_shards, "equality": section_equality}

if __name__ == "__main__":
    run_section("Placements beside one worker and beside one process.", "placements", SECTIONS)
