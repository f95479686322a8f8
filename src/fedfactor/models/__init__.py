"""The papers' networks as plain torch modules, by name: `build("resnet18", classes=100, norm="group")`."""

from fedfactor.models.cnn import CNN4, FemnistCNN, cnn4, cnn_femnist
from fedfactor.models.digits import DigitsCNN, digits_cnn
from fedfactor.models.efficientnet import EfficientNetLite0, efficientnet_lite0
from fedfactor.models.lstm import LSTMClassifier, lstm_imdb, lstm_shakespeare
from fedfactor.models.mlp import MLP, mlp
from fedfactor.models.registry import ModelInfo, build, example_input, info, list_models
from fedfactor.models.resnet import (
    BasicBlock,
    ResNet,
    ResNet8,
    ResNet10,
    ResNet18,
    ResNet34,
    resnet8,
    resnet10,
    resnet18,
    resnet34,
)
from fedfactor.models.rnn import rnn_shakespeare
from fedfactor.models.transformer import TransformerClassifier, transformer
from fedfactor.models.vgg import VGG, vgg16
from fedfactor.models.width import check_width, scaled

__all__ = [
    "CNN4",
    "MLP",
    "VGG",
    "BasicBlock",
    "DigitsCNN",
    "EfficientNetLite0",
    "FemnistCNN",
    "LSTMClassifier",
    "ModelInfo",
    "ResNet",
    "ResNet8",
    "ResNet10",
    "ResNet18",
    "ResNet34",
    "TransformerClassifier",
    "build",
    "check_width",
    "cnn4",
    "cnn_femnist",
    "digits_cnn",
    "efficientnet_lite0",
    "example_input",
    "info",
    "list_models",
    "lstm_imdb",
    "lstm_shakespeare",
    "mlp",
    "resnet8",
    "resnet10",
    "resnet18",
    "resnet34",
    "rnn_shakespeare",
    "scaled",
    "transformer",
    "vgg16",
]
