// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/model_source.h"

#include <algorithm>
#include <filesystem>
#include <functional>
#include <optional>
#include <string_view>
#include <system_error>
#include <vector>

#include "lockstep/config/input_files.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/saved_config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

// Whether a value leaves the size to be computed from others, or to be taken from the data.
bool is_open(const std::string& key, const Value& value) {
  constexpr std::string_view kSizes[] = {"model.kv_heads", "model.ffn", "model.vocab",
                                         "model.positions"};
  return value == detail::kAuto ||
         (value == Value(int64_t{0}) &&
          std::find(std::begin(kSizes), std::end(kSizes), key) != std::end(kSizes));
}

// Each key of the section model in both, but for those of the training.
void for_each_key(TrainConfig& a, TrainConfig& b,
                  const std::function<void(const Option& of_a, const Option& of_b)>& function) {
  const Schema first = train_schema(a), second = train_schema(b);
  for (size_t i = 0; i < first.sections().size(); ++i) {
    const Section &left = first.sections()[i], &right = second.sections()[i];
    if (left.name != "model") continue;
    for (size_t j = 0; j < left.options.size(); ++j) {
      const std::string& key = left.options[j].name;
      if (key != "model.dropout" && key != "model.path")
        function(left.options[j], right.options[j]);
    }
  }
}

// `there` with the keys that the user has set.
ModelSpec asked_model(const TrainConfig& config, const Origins& origins, const ModelSpec& there) {
  TrainConfig asked = config, known;
  known.model = there;
  for_each_key(asked, known, [&](const Option& mine, const Option& theirs) {
    const auto origin = origins.find(mine.name);
    const bool set = origin == origins.end() || origin->second != Origin::by_default;
    if (!set || is_open(mine.name, mine.get())) mine.put(theirs.get());
  });
  ModelSpec& model = asked.model;
  if (model.head_dim * model.heads == model.hidden) model.head_dim = 0;  // as resolved() writes it
  return model;
}

std::string value_text(const Value& value) {
  return std::holds_alternative<std::vector<double>>(value) ? toml_literal(value)
                                                            : plain_text(value);
}

// "model.heads is 4 there and 8 as configured" for each key; empty where the two are the same.
std::string model_differences(const ModelSpec& there, const ModelSpec& here) {
  TrainConfig a, b;
  a.model = there;
  b.model = here;
  std::vector<std::string> found;
  for_each_key(a, b, [&](const Option& was, const Option& is) {
    if (was.get() == is.get()) return;
    found.push_back(format("{} is {} there and {} as configured", was.name, value_text(was.get()),
                           value_text(is.get())));
  });
  return join(found);
}

constexpr const char* kRemedy = "leave out what differs, or set it as it is there";

void require_saved(const ModelSpec& saved, ModelSpec model, const std::string& path) {
  // Rotary positions have no weights: another longest sequence is no other model.
  if (saved.kind == ModelKind::llama) model.positions = saved.positions;
  if (const std::string found = model_differences(saved, model); !found.empty()) {
    throw ConfigError(format("{} is a checkpoint of another model: {}; {}", path, found, kRemedy));
  }
}

// None where a program of another kind has saved the checkpoint.
std::optional<ModelSpec> saved_model(const formats::Manifest& manifest, const std::string& path) {
  const auto json = io::parse_json(manifest.config, path);
  if (!json.is_object() || !json.contains("model")) return std::nullopt;
  try {
    return saved_config(manifest, path).model;
  } catch (const CheckpointError& failure) {
    throw ConfigError(format("checkpoint.resume: {}", failure.what()));
  }
}

// The default is meant for models of any length.
void fit_seq_len(TrainConfig& config, const Origins& origins, int64_t positions) {
  const auto origin = origins.find("train.seq_len");
  if (origin != origins.end() && origin->second == Origin::by_default)
    config.train.seq_len = std::min(config.train.seq_len, positions);
}

void complete_from_folder(TrainConfig& config, const Origins& origins) {
  const std::string path = config.model_path + "/config.json";
  std::error_code error;
  if (!fs::exists(path, error)) return;  // resolve_model() refuses it
  const ModelSpec spec = model_spec_from_hf(read_text(path, io::kMaxJsonBytes), path);
  const ModelSpec there = spec.resolved(spec.positions, spec.vocab);
  const std::string found = model_differences(there, asked_model(config, origins, there));
  if (!found.empty()) {
    throw ConfigError(
        format("model.path: {} describes another model: {}; {}", path, found, kRemedy));
  }
  fit_seq_len(config, origins, there.positions);
}

void complete_from_checkpoint(TrainConfig& config, const Origins& origins) {
  std::string& path = config.checkpoint.resume;
  path = checkpoint_at(path);
  const formats::Manifest manifest = manifest_at(path);
  take_model(config, origins, manifest, path);
  const auto origin = origins.find("data.tokenizer");
  if (origin != origins.end() && origin->second == Origin::by_default)
    config.data.tokenizer = saved_tokenizer(manifest, path).name;
}

}  // namespace

void complete_model(TrainConfig& config, const Origins& origins) {
  const std::string& resume = config.checkpoint.resume;
  const bool from_path = !resume.empty() && resume != "none" && resume != "auto";
  if (from_path && !config.model_path.empty()) refuse_two_sources(config.model_path, resume);
  if (from_path) complete_from_checkpoint(config, origins);
  if (!config.model_path.empty()) complete_from_folder(config, origins);
}

void take_model(TrainConfig& config, const Origins& origins, const formats::Manifest& manifest,
                const std::string& path) {
  if (config.checkpoint.partial) return;
  const auto saved = saved_model(manifest, path);
  if (!saved) return;
  const ModelSpec asked = asked_model(config, origins, *saved);
  require_saved(*saved, asked, path);
  config.model = asked;
  fit_seq_len(config, origins, asked.positions);
}

void require_same_model(const formats::Manifest& manifest, const ModelSpec& model,
                        const std::string& path) {
  if (const auto saved = saved_model(manifest, path))
    require_saved(*saved, model.resolved(model.positions, model.vocab), path);
  for (const TensorSpec& tensor : model.tensors()) {
    const auto found = manifest.tensors.find(tensor.name);
    if (found != manifest.tensors.end() && found->second.shape == tensor.shape) continue;
    const std::string there =
        found == manifest.tensors.end() ? "is not" : "is " + layout::describe(found->second.shape);
    throw ConfigError(format("{} is a checkpoint of another model: {} {} there, {} as configured",
                             path, tensor.name, there, layout::describe(tensor.shape)));
  }
}

void refuse_two_sources(const std::string& model_path, const std::string& resume) {
  throw ConfigError(
      format("model.path is {}, but checkpoint.resume is {}, which has the weights; leave "
             "--model.path out, or start a new run from it without --resume",
             model_path, resume));
}

}  // namespace lockstep::config
