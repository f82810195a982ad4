// Runs a model that torch.export and AOTInductor have compiled: run_exported model.pt2 samples.pt
//
// export_model.py writes both files. The program calls nothing of qkv; the model does. Linking
// qkv::qkv is enough: it loads the library, which registers the operators with torch.
//
// Exits with 1 if the outputs are not those that torch's own attention gave in Python.
#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/serialize.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: run_exported MODEL SAMPLES, both written by export_model.py\n";
    return 2;
  }
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader model(argv[1]);

  std::ifstream file(argv[2], std::ios::binary);
  const std::vector<char> bytes(std::istreambuf_iterator<char>(file), {});
  const c10::List<c10::IValue> samples =
      torch::pickle_load(bytes).toList();  // of torch.save's list

  for (const c10::IValue& sample : samples) {
    const auto& tensors = sample.toTupleRef().elements();  // input, padding, output
    const at::Tensor output = model.run({tensors[0].toTensor(), tensors[1].toTensor()})[0];
    const double difference = (output - tensors[2].toTensor()).abs().max().item<double>();
    std::cout << output.sizes() << ": differs by at most " << difference << "\n";
    if (!(difference < 1e-4)) return 1;
  }
  return 0;
}
