// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/input_files.h"

#include <linux/magic.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

#include "lockstep/config/freeze.h"
#include "lockstep/config/model/hf_model.h"
#include "lockstep/config/model_source.h"
#include "lockstep/config/pipeline_choice.h"
#include "lockstep/config/run_folder.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/core/log.h"
#include "lockstep/data/sampler.h"
#include "lockstep/data/text_files.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/io/json.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

// Enough to notice a wrong vocabulary, in a fraction of a second; the rest is checked as it is
// read.
constexpr int64_t kTokensLookedAt = int64_t{1} << 26;

void check_vocabulary(const data::Corpus& corpus, const char* key, int64_t vocab) {
  const int64_t largest = corpus.max_token(kTokensLookedAt);
  if (largest < vocab) return;
  throw ConfigError(
      format("{}: there is a token {}, but the vocabulary has {}; set model.vocab to "
             "at least {}, or data.tokenizer to the one that made the file",
             key, largest, vocab, largest + 1));
}

std::string absolute_path(const std::string& path) {
  return fs::absolute(path).lexically_normal().string();
}

// Data and order are the configuration's, the position in it the checkpoint's.
void warn_of_differences(const formats::Manifest& manifest, const TrainConfig& config, int world,
                         const std::string& path) {
  const TrainConfig before = train_config_from_json(manifest.config, path);
  const auto compare = [&](const char* key, const auto& was, const auto& is,
                           const char* effect = "samples may be seen twice or not at all") {
    if (was == is) return;
    log::warn(format("{} was written with {} {}, now it is {}: {}", path, key, was, is, effect));
  };
  compare("train.seq_len", before.train.seq_len, config.train.seq_len);
  compare("train.seed", before.train.seed, config.train.seed);
  compare("data.pack", before.data.pack, config.data.pack);
  if (absolute_path(before.data.path) != absolute_path(config.data.path))
    compare("data.path", before.data.path, config.data.path);
  if (absolute_path(before.data.validation) != absolute_path(config.data.validation))
    compare("data.validation", before.data.validation, config.data.validation);
  const auto batch = manifest.state.find("global_batch");
  const int64_t rows =
      batch != manifest.state.end()
          ? io::integer(io::parse_json(batch->second, path), path + ": state global_batch")
          : before.train.global_batch;
  if (rows > 0) {
    compare("train.global_batch", rows, config.global_batch(world),
            "the steps and the learning rate schedule cover other amounts of data");
  }
}

struct Checked {
  ModelSpec model;
  std::optional<Data> data;  // none where it must be encoded first
};

// Opens what is quick to open; encoding is left to the ranks.
Checked check_data(const TrainConfig& config) {
  const std::string name = tokenizer_name(config);
  if (name == "bytes" || config.data.path.empty()) {
    Data data = open_data(config);
    const ModelSpec model = resolve_model(config, data.tokenizer.vocab_size());
    check_vocabulary(data.train, "data.path", model.vocab);
    check_vocabulary(data.validation, "data.validation", model.vocab);
    return {model, std::move(data)};
  }
  data::check_files(config.data.path);
  if (!config.data.validation_fraction()) data::check_files(config.data.validation);
  const int64_t vocab = open_tokenizer(config).vocab_size();
  const ModelSpec model = resolve_model(config, vocab);
  if (model.vocab < vocab) {
    throw ConfigError(
        format("model.vocab is {}, but the tokenizer {} has {} tokens", model.vocab, name, vocab));
  }
  return {model, std::nullopt};
}

// Leaves out examples that have no answer in a row, and counts those that are cut.
void fit_examples(Data& data, int64_t seq_len) {
  for (data::Corpus* corpus : {&data.train, &data.validation}) {
    const size_t before = corpus->examples().size();
    *corpus = corpus->answered(seq_len);
    data.dropped += static_cast<int64_t>(before - corpus->examples().size());
    data.cut += std::ranges::count_if(corpus->examples(), [&](const data::Example& each) {
      return each.end - each.begin > seq_len + 1;
    });
  }
}

// A model that was trained on other tokens learns nothing from bytes.
void require_tokenizer(const TrainConfig& config, const Data& data) {
  if (config.model_path.empty() || config.data.tokenizer != "auto") return;
  const bool needs = !data.all.has_token_ids() || !data.validation.has_token_ids();
  if (!needs || data.tokenizer.name() != "bytes") return;
  throw ConfigError(format(
      "model.path: {} has no tokenizer.json, which data.path {} needs; name one with "
      "--data.tokenizer PATH, or give --data.tokenizer bytes if the model's tokens are bytes",
      config.model_path, config.data.path));
}

void check_metrics_file(const std::string& path) {
  if (path.empty() || path == "auto") return;
  std::error_code failure;
  if (fs::exists(path, failure) && !fs::is_regular_file(path, failure)) {
    throw ConfigError(format("metrics.file: {} is not a regular file; choose another place", path));
  }
  const auto folder = fs::path(path).parent_path();
  if (!folder.empty()) fs::create_directories(folder, failure);
  if (failure || !std::ofstream(path, std::ios::app)) {
    throw ConfigError(format("metrics.file: cannot write {}; choose another place", path));
  }
}

void check_folder(const char* key, const std::string& folder, const char* what) {
  if (!fs::is_directory(folder) || access(folder.c_str(), W_OK | X_OK) != 0) {
    throw ConfigError(
        format("{}: {} is not a folder that can be written; name one, for {}", key, folder, what));
  }
  struct statfs system = {};
  if (statfs(folder.c_str(), &system) == 0 && system.f_type == TMPFS_MAGIC) {
    log::warn(format("{}: {} is a file system in memory (tmpfs): {} there do not leave memory", key,
                     folder, what));
  }
}

void check_disks(const TrainConfig& config) {
  if (config.memory.strategy == layout::MemoryStrategy::extreme &&
      config.memory.store == ActivationStore::disk) {
    check_folder("memory.disk", activation_folder(config.memory),
                 "the activations of memory.strategy extreme");
  }
  if (!config.offload.disk.empty())
    check_folder("offload.disk", config.offload.disk, "the states of the optimizer");
}

}  // namespace

std::string activation_folder(const MemoryConfig& config) {
  if (!config.disk.empty()) return config.disk;
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

ModelSpec resolve_model(const TrainConfig& config, int64_t tokenizer_vocab) {
  if (config.model_path.empty()) {
    return config.model.resolved(config.train.seq_len, tokenizer_vocab);
  }
  const std::string path = config.model_path + "/config.json";
  if (!fs::exists(path)) {
    throw ConfigError(
        format("model.path: there is no {}; it must be a Hugging Face model folder", path));
  }
  ModelSpec spec = model_spec_from_hf(read_text(path, io::kMaxJsonBytes), path);
  spec.dropout = config.model.dropout;
  if (config.train.seq_len > spec.positions) {
    throw ConfigError(
        format("train.seq_len is {}, but the model in {} has {} positions; set --seq-len to at "
               "most {}",
               config.train.seq_len, config.model_path, spec.positions, spec.positions));
  }
  return spec;
}

Data open_data(const TrainConfig& config) {
  if (config.data.path.empty()) {
    throw ConfigError(
        "data.path is not set: name a text file, a folder of text, JSON lines, or token files");
  }
  data::Tokenizer tokenizer = open_tokenizer(config);
  const auto open = [&](const std::string& path) {
    data::Corpus corpus = data::Corpus::open(path, tokenizer);
    return config.data.pack ? corpus.documents(tokenizer.end_of_text()) : corpus;
  };
  const data::Corpus all = open(config.data.path);
  const auto fraction = config.data.validation_fraction();
  const data::Split split = data::hold_out(all, fraction.value_or(0));
  const data::Corpus validation = fraction ? split.validation : open(config.data.validation);
  Data data{tokenizer, split.train, validation, all, validation};
  require_tokenizer(config, data);
  fit_examples(data, config.train.seq_len);
  if (config.data.pack) {
    data.train = data.train.packed(config.train.seq_len);
    data.validation = data.validation.packed(config.train.seq_len);
  }
  if (data.validation.has_examples() && data.validation.examples().empty() &&
      (config.train.eval_every > 0 || config.train.eval_first.value_or(false))) {
    throw ConfigError(
        format("data.validation {} leaves no example to validate on, of {} in {}; use a larger "
               "fraction or a separate file",
               config.data.validation, all.examples().size(), config.data.path));
  }
  if (data.train.has_examples()) {
    if (!data.train.examples().empty()) return data;
    if (split.train.has_documents()) {
      throw ConfigError(format(
          "data.path: {} has no document of at least two tokens to train on, of {}; use more "
          "data",
          config.data.path,
          counted(static_cast<int64_t>(split.train.examples().size()), "document")));
    }
    throw ConfigError(
        format("data.path: {} has no example to train on whose completion begins within "
               "train.seq_len {}, of {}; use more data or a larger train.seq_len",
               config.data.path, config.train.seq_len,
               counted(static_cast<int64_t>(split.train.examples().size()), "example")));
  }
  if (data::window_count(split.train.size(), config.train.seq_len) < 1) {
    throw ConfigError(
        format("data.path: {} has {} tokens to train on, fewer than one sequence of "
               "train.seq_len {} + 1; use more data or a smaller train.seq_len",
               config.data.path, split.train.size(), config.train.seq_len));
  }
  return data;
}

DataIdentities Data::identities(const DataConfig& config) const {
  DataIdentities found{{"data", all.identity()}};
  if (!config.validation_fraction()) found.emplace("validation", all_validation.identity());
  return found;
}

std::string describe(const DataIdentities& identities) {
  std::string lines;
  for (const auto& [name, identity] : identities) {
    lines += format("data.{} has {}\n", name == "data" ? "path" : name, identity.describe());
  }
  return lines;
}

std::map<std::string, std::string> state_of(const DataIdentities& identities) {
  std::map<std::string, std::string> state;
  for (const auto& [name, identity] : identities) {
    state[name] = format(R"({{"tokens":{},"crc32c":"{:08x}","documents":"{:08x}","modified":{}}})",
                         identity.tokens, identity.crc, identity.documents, identity.modified);
  }
  return state;
}

void require_same_data(const formats::Manifest& manifest, const DataIdentities& identities,
                       const TrainConfig& config, const std::string& path, bool speaks) {
  const TrainConfig before = train_config_from_json(manifest.config, path);
  for (const auto& [name, now] : identities) {
    const auto found = manifest.state.find(name);
    if (found == manifest.state.end()) continue;  // of a version that did not keep it
    if (name == "validation" && before.data.validation != config.data.validation) continue;
    const std::string key = name == "data" ? "path" : name;
    const std::string origin = format("{}: state {}", path, name);
    const auto json = io::parse_json(found->second, origin);
    const auto checksum = [&](const char* key) {
      return static_cast<uint32_t>(
          std::strtoul(io::string_member(json, key, origin).c_str(), nullptr, 16));
    };
    const data::DataIdentity was{
        .tokens = io::integer(io::member(json, "tokens", origin), origin),
        .crc = checksum("crc32c"),
        .documents = json.contains("documents") ? checksum("documents") : 0,
        .modified = io::integer(io::member(json, "modified", origin), origin)};
    if (was != now && !config.checkpoint.other_data) {
      throw ConfigError(
          format("{} was trained on data.{} of {}, but {} has {}; restore the data, accept it with "
                 "--checkpoint.other_data true, or begin at step 0 with --checkpoint.load model",
                 path, key, was.describe(),
                 name == "data" ? config.data.path : config.data.validation, now.describe()));
    }
    if (was != now && speaks) {
      log::warn(format("{} was trained on data.{} of {}, now it has {}", path, key, was.describe(),
                       now.describe()));
    }
    if (speaks && was == now && now.is_sampled() && was.modified != now.modified &&
        before.data.path == config.data.path) {
      log::warn(
          format("data.{} was modified after {} was written; the runs of it that were compared are "
                 "the same",
                 key, path));
    }
  }
}

formats::Manifest manifest_at(const std::string& path, bool verify) {
  try {
    return verify ? formats::verify(path) : formats::read_manifest(path);
  } catch (const CheckpointError& failure) {
    throw ConfigError(format("{}; {}", failure.what(), other_checkpoints(path)));
  }
}

std::string checkpoint_at(const std::string& name) {
  std::string path = checkpoint_path(name);
  if (fs::exists(path + "/manifest.json")) return path;
  const auto newest = formats::newest_complete(checkpoint_folder(path));
  if (!newest) throw ConfigError(format("there is no complete checkpoint in {}", path));
  return newest->path;
}

std::string describe_choice(const std::string& name, const std::string& checkpoint) {
  if (same_folder(checkpoint_path(name), checkpoint)) return {};
  const std::string folder = checkpoint_folder(name);
  const int64_t step = formats::read_manifest(checkpoint).step;
  std::string text = format("{} is of step {}", checkpoint, step);
  const auto best = formats::best_step(folder);
  if (best && *best != step)
    text += format("; {}/best, of step {}, has the lowest validation loss", folder, *best);
  return text;
}

std::optional<std::string> find_checkpoint(const CheckpointConfig& config) {
  if (config.resume == "none") return std::nullopt;
  if (config.resume != "auto") return checkpoint_at(config.resume);
  const auto newest = formats::newest_complete(config.dir);
  if (newest) return newest->path;
  if (const auto damaged = formats::list_complete(config.dir); !damaged.empty()) {
    throw ConfigError(format(
        "checkpoint.resume auto: none of the {} checkpoints in {} is sound; choose another folder "
        "(checkpoint.dir), or remove them to begin at step 0",
        damaged.size(), config.dir));
  }
  return std::nullopt;
}

std::string other_checkpoints(const std::string& path) {
  const fs::path folder = fs::path(path).lexically_normal();
  const fs::path parent =
      folder.has_filename() ? folder.parent_path() : folder.parent_path().parent_path();
  std::vector<std::string> others;
  for (const auto& found : formats::list_sound(parent.empty() ? "." : parent.string())) {
    others.push_back(found.path);
  }
  return others.empty() ? "no other checkpoint there is sound" : "sound ones: " + join(others);
}

ModelSpec check_inputs(const TrainConfig& config, int world, const CheckOptions& options) {
  config.validate(world);
  const auto [model, data] = check_data(config);
  validate_tensor(config, model);
  frozen_tensors(config, model);
  if (is_pipelined(config.parallel)) layers_per_stage(config.parallel, model.layers);
  check_metrics_file(config.metrics.file);
  check_disks(config);
  // What the run folder will have is not there yet.
  const std::string dir = config.checkpoint.dir == "auto" ? "" : config.checkpoint.dir;
  if (!dir.empty()) formats::check_writable(dir);
  int64_t begin = -1;
  if (const auto path = find_checkpoint(config.checkpoint)) {
    // With `auto` an older one will do where this one is damaged: the ranks see to that, who read
    // all of it anyway.
    const auto manifest = manifest_at(*path, options.verify && config.checkpoint.resume != "auto");
    if (!config.checkpoint.partial) require_same_model(manifest, model, *path);
    const bool goes_on = config.checkpoint.load == LoadWhat::all;
    if (goes_on) warn_of_differences(manifest, config, world, *path);
    warn_of_other_tokenizer(manifest, *path, tokenizer_name(config));
    if (goes_on && !config.checkpoint.partial)
      require_optimizer_state(manifest, config, model, *path);
    if (goes_on && data) require_same_data(manifest, data->identities(config.data), config, *path);
    begin = goes_on ? manifest.step : 0;
    if (begin >= config.train.steps) {
      log::warn(
          format("{} is at step {} and train.steps is {}: no step is left to train; set --steps to "
                 "more than {}",
                 *path, begin, config.train.steps, begin));
    }
  } else {
    warn_of_other_tokenizer(config);
  }
  const auto others =
      dir.empty() ? std::vector<formats::Checkpoint>{} : formats::list_complete(dir);
  // With an older one to begin from, what this run saves would count as old, and be removed.
  if (others.empty() || others.back().step <= begin || config.checkpoint.resume == "auto")
    return model;
  throw ConfigError(
      format("checkpoint.dir: {} has checkpoints of another run, up to step {}; "
             "resume from there with --checkpoint.resume auto, or choose another "
             "--checkpoint.dir",
             dir, others.back().step));
}

}  // namespace lockstep::config
