// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/infer/model_options.h"

#include <algorithm>
#include <filesystem>
#include <string_view>

#include "lockstep/config/input_files.h"
#include "lockstep/config/model/hf_model.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/io/json.h"

namespace lockstep::cli {
namespace {

namespace fs = std::filesystem;
using config::TrainConfig;

bool is_of_layout(const std::string& key) {
  constexpr std::string_view kSections[] = {"parallel.", "offload.", "memory.", "comm."};
  constexpr std::string_view kKeys[] = {"train.device", "train.dtype", "train.threads"};
  return std::ranges::any_of(kSections, [&](auto section) { return key.starts_with(section); }) ||
         std::ranges::find(kKeys, key) != std::end(kKeys);
}

int ranks_of(const std::string& command, const std::string& text) {
  const auto ranks = config::parse_integer(text);
  if (!ranks || *ranks < 1 || *ranks > 1 << 20)
    throw ConfigError(format("{}: -n is '{}', must be a whole number at least 1", command, text));
  return static_cast<int>(*ranks);
}

}  // namespace

const char* const kLayoutHelp =
    "  -n N                        Number of ranks to start on this machine\n"
    "  --parallel.KEY VALUE        How ranks share the model, as in lockstep train; also\n"
    "                              --offload.KEY, --memory.KEY, --comm.KEY, --train.device,\n"
    "                              --train.dtype and --train.threads\n";

std::vector<std::string> take_layout(const std::vector<std::string>& arguments,
                                     const std::string& command, ModelOptions& options) {
  TrainConfig scratch;
  config::Schema schema = config::train_schema(scratch);
  std::vector<std::string> rest;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const std::string& word = arguments[i];
    const size_t equals = word.find('=');
    const std::string flag = word.substr(0, equals);
    const bool is_key = flag.starts_with("--") && flag.find('.') != std::string::npos;
    if (flag != "-n" && !(is_key && is_of_layout(flag.substr(2)))) {
      rest.push_back(word);
      continue;
    }
    if (equals == std::string::npos && i + 1 == arguments.size())
      throw ConfigError(format("{}: {} needs a value", command, flag));
    const std::string value =
        equals == std::string::npos ? arguments[++i] : word.substr(equals + 1);
    if (flag == "-n") {
      options.ranks = ranks_of(command, value);
    } else {
      schema.set_flag(flag.substr(2), value);
      options.layout.emplace_back(flag.substr(2), value);
    }
  }
  return rest;
}

void add_model_options(CLI::App& app, ModelOptions& options) {
  app.add_option(
         "--checkpoint", options.checkpoint,
         "Checkpoint; run folder or folder of checkpoints, which means the newest; RUN/best "
         "for the best; or a Hugging Face folder")
      ->required();
  app.add_option("--tokenizer", options.tokenizer,
                 "Path of a tokenizer.json (default: the tokenizer of the model)");
}

void find_model(ModelOptions& options) {
  std::error_code error;
  options.is_hugging_face = fs::exists(options.checkpoint + "/config.json", error) &&
                            !fs::exists(options.checkpoint + "/manifest.json", error);
  if (options.is_hugging_face) {
    options.path = fs::absolute(options.checkpoint).lexically_normal().string();
    return;
  }
  options.path = config::checkpoint_at(options.checkpoint);
  options.choice = config::describe_choice(options.checkpoint, options.path);
}

ModelSource open_model(const ModelOptions& options) {
  ModelSource source;
  if (options.is_hugging_face) {
    const std::string file = options.path + "/config.json";
    const config::ModelSpec spec =
        config::model_spec_from_hf(read_text(file, io::kMaxJsonBytes), file);
    source.config.model = spec.resolved(spec.positions, spec.vocab);
    source.config.model_path = options.path;
  } else {
    source.manifest = formats::read_manifest(options.path);
    source.trained = config::train_config_from_json(source.manifest->config, options.path);
    source.config.model = source.trained.model;
    source.config.data = source.trained.data;
  }
  TrainConfig& config = source.config;
  config.model.dropout = 0;
  // A configuration is validated as that of a training, which has data; models that were imported
  // have none.
  config.data.path = options.path;
  config.train.micro_batch = 1;
  config.train.seq_len = config.model.positions;
  config.train.recompute = layout::Recompute::none;
  config.train.fit.reset();
  config.comm.timeout = 0;
  config::Schema schema = config::train_schema(config);
  for (const auto& [key, value] : options.layout) schema.set_flag(key, value);
  if (config.parallel.sequence_parallel)
    throw ConfigError("parallel.sequence_parallel is for training; leave it out");
  if (config.parallel.cp > 1)
    throw ConfigError(
        format("parallel.cp is {}: it is for training; leave it out", config.parallel.cp));
  if (config.parallel.chunks > 1)
    throw ConfigError(
        format("parallel.chunks is {}: several stages on a rank are for training; leave it out",
               config.parallel.chunks));
  // Nothing is trained: what is offloaded is the parameters.
  if (config.offload.any()) {
    config.offload.params = true;
    config.offload.grads = config.offload.optimizer = false;
  }
  return source;
}

ModelTokenizer open_tokenizer(const ModelOptions& options, const ModelSource& source) {
  config::SavedTokenizer saved;
  if (source.manifest) {
    saved = config::saved_tokenizer(*source.manifest, options.path);
    if (saved.name == "auto") saved.name = "bytes";
  } else {
    const std::string file = options.path + "/tokenizer.json";
    std::error_code error;
    if (!fs::exists(file, error) && options.tokenizer.empty()) {
      throw ConfigError(
          format("{} has no tokenizer.json; name one with --tokenizer PATH", options.checkpoint));
    }
    saved = {.name = file,
             .model_folder = options.path,
             .files = data::find_model_files(file, options.path)};
  }
  ModelTokenizer found{
      data::Tokenizer::open(options.tokenizer.empty() ? saved.name : options.tokenizer,
                            options.tokenizer.empty() ? saved.model_folder : ""),
      saved.files};
  if (!options.tokenizer.empty() && source.manifest)
    config::warn_of_other_tokenizer(*source.manifest, options.path, options.tokenizer);
  if (found.tokenizer.vocab_size() > source.config.model.vocab) {
    throw ConfigError(
        format("the tokenizer {} has {} tokens, more than the model's vocabulary of {}; name "
               "another with --tokenizer PATH",
               found.tokenizer.name(), found.tokenizer.vocab_size(), source.config.model.vocab));
  }
  return found;
}

}  // namespace lockstep::cli
