"""TensorFlow's ParameterServerStrategy on the same jobs: asynchronous, one server, two workers and a coordinator.

Runs in an environment of its own (`make peers`), and so imports nothing of ours. Written with plain operations: the
momentum update is the one that TensorFlow has an operation for, placed with its variable on the server.

python tensorflow_peer.py ROLE INDEX --cluster '{"worker": [...], ...}' --job mlp --baton SOCKET
"""

import argparse
import json
import os
import time
from itertools import pairwise

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from turns import follow

CLASSES = 10
BATCHES = 4
RATE, MOMENTUM = 0.001, 0.9
VGG_WIDTHS = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))


class Net:
    """Variables in the order in which layers ask for them; the same layers as in `manyhands/models`."""

    def __init__(self, job):
        self.job = job
        self.variables = []
        self._next = 0
        self._is_built = False

    def __call__(self, inputs):
        self._next = 0
        outputs = getattr(self, "_" + self.job.replace("-", "_"))(inputs)
        self._is_built = True
        return outputs

    def _variable(self, shape, scale):
        if not self._is_built:
            self.variables.append(
                tf.Variable(tf.random.normal(shape, stddev=scale, seed=len(self.variables)))
            )
        self._next += 1
        return self.variables[self._next - 1]

    def _linear(self, inputs, outputs):
        count = inputs.shape[-1]
        weight = self._variable((count, outputs), (2 / count) ** 0.5)
        return tf.nn.bias_add(tf.matmul(inputs, weight), self._variable((outputs,), 0.0))

    def _conv(self, inputs, width, kernel, stride=1, padding="SAME"):
        channels = inputs.shape[-1]
        scale = (2 / (kernel * kernel * channels)) ** 0.5
        weight = self._variable((kernel, kernel, channels, width), scale)
        outputs = tf.nn.conv2d(inputs, weight, stride, padding)
        return tf.nn.relu(tf.nn.bias_add(outputs, self._variable((width,), 0.0)))

    def _mlp(self, value):
        for _ in range(2):
            value = tf.nn.relu(self._linear(value, 4096))
        return self._linear(value, CLASSES)

    def _small_mlp(self, value):
        return self._linear(tf.nn.relu(self._linear(value, 256)), CLASSES)

    def _vgg16(self, value):
        for width, depth in VGG_WIDTHS:
            for _ in range(depth):
                value = self._conv(value, width, 3)
            value = tf.nn.max_pool2d(value, 2, 2, "VALID")
        return self._linear(tf.reduce_mean(value, (1, 2)), CLASSES)

    def _alexnet(self, value):
        value = self._conv(tf.pad(value, ((0, 0), (2, 2), (2, 2), (0, 0))), 64, 11, 4, "VALID")
        value = tf.nn.max_pool2d(value, 3, 2, "VALID")
        value = tf.nn.max_pool2d(self._conv(value, 192, 5), 3, 2, "VALID")
        for width in (384, 256, 256):
            value = self._conv(value, width, 3)
        value = tf.nn.max_pool2d(value, 3, 2, "VALID")
        value = tf.reshape(tf.tile(value, (1, 6, 6, 1)), (-1, 6 * 6 * 256))
        for _ in range(2):
            value = tf.nn.relu(self._linear(tf.nn.dropout(value, 0.5), 4096))
        return self._linear(value, CLASSES)


SHAPES = {"mlp": (3072,), "small-mlp": (784,), "vgg16": (32, 32, 3), "alexnet": (64, 64, 3)}


def coordinate(options, resolver):
    """The chief: schedules steps on the workers, as many at a time as they take, and reads when each ended."""
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    shape = SHAPES[options.job]
    net = Net(options.job)
    with strategy.scope():
        net(tf.zeros((1, *shape)))
        speeds = [tf.Variable(tf.zeros_like(variable)) for variable in net.variables]

    def batches():
        inputs = tf.random.normal((BATCHES, options.batch, *shape))
        targets = tf.random.uniform((BATCHES, options.batch), maxval=CLASSES, dtype=tf.int32)
        return tf.data.Dataset.from_tensor_slices((inputs, targets)).repeat()

    @tf.function
    def step(iterator):
        inputs, targets = next(iterator)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, net(inputs))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, net.variables)
        updates = [
            tf.raw_ops.ResourceApplyMomentum(
                var=variable.handle, accum=speed.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
            )
            for variable, speed, gradient in zip(net.variables, speeds, gradients, strict=True)
        ]
        with tf.control_dependencies([loss, *[update for update in updates if update is not None]]):
            return tf.identity(loss), tf.timestamp()

    iterator = iter(coordinator.create_per_worker_dataset(batches))

    def run(count):
        """So many steps of each worker, whoever makes them; what is told are the steps of all together."""
        begin = time.time()
        results = [coordinator.schedule(step, (iterator,)) for _ in range(options.workers * count)]
        coordinator.join()
        found = sorted((float(at), float(loss)) for loss, at in coordinator.fetch(results))
        ends = [begin, *(at for at, _ in found[options.workers - 1 :: options.workers])]
        return {
            "batch": options.batch * options.workers,
            "step_s": [end - start for start, end in pairwise(ends)],
            "losses": [loss for _, loss in found],
        }

    follow(options.baton, 0, run)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("chief", "worker", "ps"))
    parser.add_argument("index", type=int)
    parser.add_argument("--cluster", type=json.loads, required=True)
    parser.add_argument("--job", choices=SHAPES, required=True)
    parser.add_argument("--baton", required=True)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()
    options.workers = len(options.cluster["worker"])
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": options.cluster, "task": {"type": options.role, "index": options.index}}
    )
    tf.config.threading.set_intra_op_parallelism_threads(1)
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    if options.role == "chief":
        coordinate(options, resolver)
    else:
        server = tf.distribute.Server(
            resolver.cluster_spec(), job_name=options.role, task_index=options.index, protocol="grpc"
        )
        server.join()


if __name__ == "__main__":
    main()
