"""ms-swift 4.5.3, before a fix: a short window of a classifier was divided by the micro-batches of a full one.

#10084 fixed it in 4.6.0.
"""

from __future__ import annotations

from conformance.trainers import swift

TITLE, VERSION_OF = "ms-swift before a fix", "ms-swift"
DOCS = "https://github.com/modelscope/ms-swift/pull/10084"
FEATURES = swift.FEATURES
train = swift.train
