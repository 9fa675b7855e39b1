#include "lockstep/config/inputs.h"

#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "lockstep/config/hf_model.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/mapped_file.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/sampler.h"
#include "lockstep/formats/text_files.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

// Enough to notice a wrong vocabulary, in a fraction of a second; the rest is checked as it is
// read.
constexpr int64_t kTokensLookedAt = int64_t{1} << 26;

std::string read_text(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.size()};
}

void check_vocabulary(const formats::Corpus& corpus, const char* key, int64_t vocab) {
  const int64_t largest = corpus.max_token(kTokensLookedAt);
  if (largest < vocab) return;
  throw ConfigError(
      format("{}: there is a token {}, but the vocabulary has {}; set model.vocab to "
             "at least {}, or data.tokenizer to the one that made the file",
             key, largest, vocab, largest + 1));
}

void check_memory(const TrainConfig& config, const ModelSpec& model) {
  const int64_t limit = config.memory.max_per_device;
  if (limit == 0) return;
  // Weights, gradients and optimizer state; 16-bit weights have a float32 master.
  const bool half = config.train.dtype == Precision::bfloat16;
  const bool adamw = config.optim.name == OptimizerKind::adamw;
  const int64_t buffers = adamw ? 2 : config.optim.momentum > 0 ? 1 : 0;
  const int64_t each = (half ? 2 + 2 + 4 : 4 + 4) + 4 * buffers;
  const int64_t needed = each * model.parameters();
  if (needed <= limit) return;
  throw ConfigError(
      format("memory.max_per_device is {} bytes, but weights, gradients and optimizer state of {} "
             "parameters take {} ({} each); use a smaller model or allow more",
             limit, model.parameters(), needed, each));
}

void check_same_model(const formats::Manifest& manifest, const ModelSpec& model,
                      const std::string& path) {
  for (const TensorSpec& tensor : model.tensors()) {
    const auto found = manifest.tensors.find(tensor.name);
    if (found != manifest.tensors.end() && found->second.shape == tensor.shape) continue;
    const std::string there =
        found == manifest.tensors.end() ? "is not" : "is " + layout::describe(found->second.shape);
    const std::string hint =
        tensor.name == "positions.weight" ? "; model.positions may differ from train.seq_len" : "";
    throw ConfigError(format("{} is a checkpoint of another model: {} {} there, {} as configured{}",
                             path, tensor.name, there, layout::describe(tensor.shape), hint));
  }
}

void check_metrics_file(const std::string& path) {
  if (path.empty()) return;
  std::error_code failure;
  const auto folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, failure);
  if (failure || !std::ofstream(path, std::ios::app)) {
    throw ConfigError(format("metrics.file: cannot write {}; choose another place", path));
  }
}

}  // namespace

ModelSpec resolve_model(const TrainConfig& config, int64_t tokenizer_vocab) {
  if (config.model_path.empty()) {
    return config.model.resolved(config.train.seq_len, tokenizer_vocab);
  }
  const std::string path = config.model_path + "/config.json";
  if (!fs::exists(path)) {
    throw ConfigError(
        format("model.path: there is no {}; it must be a Hugging Face model folder", path));
  }
  ModelSpec spec = model_spec_from_hf(read_text(path), path);
  spec.dropout = config.model.dropout;
  if (config.train.seq_len > spec.positions) {
    throw ConfigError(format("train.seq_len is {}, but the model in {} has {} positions",
                             config.train.seq_len, config.model_path, spec.positions));
  }
  return spec;
}

std::string tokenizer_name(const TrainConfig& config) {
  const std::string& name = config.data.tokenizer;
  if (name == "bytes") return name;
  if (name != "auto") return fs::absolute(name).string();
  const std::string beside = config.model_path + "/tokenizer.json";
  return !config.model_path.empty() && fs::exists(beside) ? fs::absolute(beside).string() : "bytes";
}

Data open_data(const TrainConfig& config) {
  if (config.data.path.empty()) {
    throw ConfigError("data.path is not set: name a text file, a folder of text, or token files");
  }
  formats::Tokenizer tokenizer = formats::Tokenizer::open(tokenizer_name(config));
  const formats::Corpus all = formats::Corpus::open(config.data.path, tokenizer);
  const auto fraction = config.data.validation_fraction();
  const formats::Split split = formats::hold_out(all, fraction.value_or(0));
  if (formats::window_count(split.train.size(), config.train.seq_len) < 1) {
    throw ConfigError(
        format("data.path: {} has {} tokens to train on, fewer than one sequence of "
               "train.seq_len {} + 1; use more data or a smaller train.seq_len",
               config.data.path, split.train.size(), config.train.seq_len));
  }
  return {tokenizer, split.train,
          fraction ? split.validation : formats::Corpus::open(config.data.validation, tokenizer)};
}

std::optional<std::string> find_checkpoint(const CheckpointConfig& config) {
  if (config.resume == "none") return std::nullopt;
  const bool automatic = config.resume == "auto";
  const std::string& place = automatic ? config.dir : config.resume;
  if (!automatic && fs::exists(place + "/manifest.json")) return place;
  const auto newest = formats::newest(place);
  if (newest) return newest->path;
  if (automatic) return std::nullopt;
  throw ConfigError(format("there is no complete checkpoint in {}", place));
}

void check_inputs(const TrainConfig& config, int world) {
  config.validate(world);
  // Encoding is left to the ranks; all else is quick.
  const bool quick = tokenizer_name(config) == "bytes";
  int64_t tokenizer_vocab = 0;
  if (quick || config.data.path.empty()) {
    const Data data = open_data(config);
    tokenizer_vocab = data.tokenizer.vocab_size();
    const int64_t vocab = resolve_model(config, tokenizer_vocab).vocab;
    check_vocabulary(data.train, "data.path", vocab);
    check_vocabulary(data.validation, "data.validation", vocab);
  } else {
    tokenizer_vocab = formats::Tokenizer::open(tokenizer_name(config)).vocab_size();
    formats::find_data_files(config.data.path);
  }
  const ModelSpec model = resolve_model(config, tokenizer_vocab);
  if (model.vocab < tokenizer_vocab && !quick) {
    throw ConfigError(format("model.vocab is {}, but the tokenizer {} has {} tokens", model.vocab,
                             tokenizer_name(config), tokenizer_vocab));
  }
  check_memory(config, model);
  check_metrics_file(config.metrics.file);
  if (config.checkpoint.dir.empty()) return;
  formats::check_writable(config.checkpoint.dir);
  if (const auto path = find_checkpoint(config.checkpoint)) {
    check_same_model(formats::verify(*path), model, *path);
  } else if (config.checkpoint.resume == "none") {
    const auto others = formats::list_complete(config.checkpoint.dir);
    if (!others.empty()) {
      throw ConfigError(
          format("checkpoint.dir: {} has checkpoints of another run, up to step {}; "
                 "go on from there with --checkpoint.resume auto, or choose another "
                 "--checkpoint.dir",
                 config.checkpoint.dir, others.back().step));
    }
  }
}

}  // namespace lockstep::config
