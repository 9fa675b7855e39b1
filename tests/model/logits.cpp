// SPDX-License-Identifier: Apache-2.0
// Loads a Hugging Face folder and compares the model's logits with those in expected.safetensors
// (tokens, logits), which another implementation put there:
//
//   model_logits FOLDER [TOLERANCE]
//
// Prints the largest difference, relative to the largest logit, and fails above the tolerance.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <iostream>
#include <string>

#include "lockstep/config/model/hf_model.h"
#include "lockstep/core/error.h"
#include "lockstep/core/mapped_file.h"
#include "lockstep/formats/safetensors.h"
#include "lockstep/model/language_model.h"

namespace {

at::Tensor read(const lockstep::formats::SafetensorsFile& file, const char* name,
                at::ScalarType type) {
  const auto& entry = file.at(name);
  auto* data = const_cast<std::byte*>(file.bytes(entry).data());
  return at::from_blob(data, entry.shape, type).clone();
}

}  // namespace

int main(int argc, char** argv) {
  using namespace lockstep;
  try {
    if (argc < 2) throw ConfigError("usage: model_logits FOLDER [TOLERANCE]");
    const std::string folder = argv[1];
    const double tolerance = argc > 2 ? std::stod(argv[2]) : 1e-4;
    const at::NoGradGuard no_grad;
    const std::string path = folder + "/config.json";
    const MappedFile text(path);
    const auto spec = config::model_spec_from_hf(
        {reinterpret_cast<const char*>(text.bytes().data()), text.size()}, path);
    model::LanguageModel model(spec);
    model::load_hugging_face(*model, folder);
    model->eval();
    const formats::SafetensorsFile expected(folder + "/expected.safetensors");
    const at::Tensor logits = read(expected, "logits", at::kFloat);
    const at::Tensor found = model->forward(read(expected, "tokens", at::kLong));
    const double difference = ((found - logits).abs().max() / logits.abs().max()).item<double>();
    std::cout << spec.describe() << ": largest logit " << logits.abs().max().item<double>()
              << ", difference " << difference << " of it\n";
    return difference <= tolerance ? 0 : 1;
  } catch (const std::exception& failure) {
    std::cerr << "model_logits: " << failure.what() << "\n";
    return 2;
  }
}
