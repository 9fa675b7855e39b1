// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/hf/hf_import.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>
#include <span>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/config/model/hf_model.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/elements.h"
#include "lockstep/formats/hf_directory.h"
#include "lockstep/formats/shard_file.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/folder_lock.h"
#include "lockstep/io/json.h"
#include "lockstep/io/staged_folder.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kReadElements = int64_t{1} << 20;  // elements that are converted at a time

ModelSpec model_in(const std::string& folder) {
  std::error_code error;
  const std::string path = folder + "/config.json";
  if (!fs::exists(path, error)) {
    throw ConfigError(format("there is no {}; it must be a Hugging Face model folder", path));
  }
  const ModelSpec spec = model_spec_from_hf(read_text(path, io::kMaxJsonBytes), path);
  return spec.resolved(spec.positions, spec.vocab);
}

void require_safetensors(const std::string& folder) {
  std::error_code error;
  const auto has = [&](const char* name) { return fs::exists(folder + "/" + name, error); };
  if (has("model.safetensors") || has("model.safetensors.index.json")) return;
  for (const char* name : {"pytorch_model.bin", "pytorch_model.bin.index.json"}) {
    if (!has(name)) continue;
    throw ConfigError(
        format("{} has {} but no model.safetensors; pickled weights are not read: load them with "
               "transformers and save_pretrained() them as safetensors",
               folder, name));
  }
}

// Buffers that other versions of transformers saved with the weights: masks and frequencies.
bool is_buffer(const std::string& name, ModelKind kind) {
  if (kind == ModelKind::llama) return name.ends_with("rotary_emb.inv_freq");
  return name.ends_with(".attn.bias") || name.ends_with(".attn.masked_bias");
}

std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMost = 8;
  const std::vector<std::string> first(
      names.begin(), names.begin() + static_cast<long>(std::min(kMost, names.size())));
  return join(first) + (names.size() > kMost ? format(" and {} more", names.size() - kMost) : "");
}

// The folder's tensors by ours, every one of them looked at.
class Weights {
 public:
  Weights(const std::string& folder, const ModelSpec& model)
      : folder_(folder), directory_(folder), model_(model) {
    std::vector<std::string> missing;
    for (const HfPart& part : hf_parts(model)) {
      const std::string prefixed = "transformer." + part.theirs;
      const std::string& name = directory_.contains(prefixed) ? prefixed : part.theirs;
      (directory_.contains(name) ? used_ : missing).push_back(name);
      parts_[part.ours].push_back(part);
      parts_[part.ours].back().theirs = name;
    }
    if (!missing.empty()) {
      throw CheckpointError(format("{}: {} of the {} tensors of {} are missing: {}", folder,
                                   missing.size(), missing.size() + used_.size(), model.describe(),
                                   some_of(missing)));
    }
    require_all_known();
    for (const TensorSpec& tensor : model.tensors()) {
      for (const HfPart& part : parts_.at(tensor.name)) require_form(tensor, part);
    }
  }

  // All bytes of one of our tensors, in order. Returns how many values overflowed.
  int64_t write(const std::string& ours, DType dtype, formats::SafetensorsWriter& writer) {
    int64_t overflowed = 0;
    const auto put = [&](DType stored, std::span<const std::byte> bytes) {
      std::vector<std::byte> converted(bytes.size() / size_of(stored) * size_of(dtype));
      overflowed += formats::convert(stored, bytes, dtype, converted);
      writer.write(ours, converted);
    };
    for (const HfPart& part : parts_.at(ours)) {
      const formats::HfTensor tensor = directory_.find(part.theirs);
      const DType stored = *formats::dtype_of(tensor.dtype);
      if (part.transposed) {
        const formats::Matrix matrix{tensor.bytes, tensor.shape[0], tensor.shape[1],
                                     size_of(stored)};
        formats::transpose_in_pieces(matrix, kReadElements,
                                     [&](std::span<const std::byte> piece) { put(stored, piece); });
        continue;
      }
      const size_t most = static_cast<size_t>(kReadElements) * size_of(stored);
      for (size_t begin = 0; begin < tensor.bytes.size(); begin += most) {
        put(stored, tensor.bytes.subspan(begin, std::min(most, tensor.bytes.size() - begin)));
      }
    }
    return overflowed;
  }

 private:
  void require_all_known() {
    const std::set<std::string> used(used_.begin(), used_.end());
    std::vector<std::string> unknown;
    for (const std::string& name : directory_.names()) {
      if (used.contains(name) || is_buffer(name, model_.kind)) continue;
      if (name == "lm_head.weight" && model_.is_tied()) {
        require_same_head(name);
        continue;
      }
      unknown.push_back(name);
    }
    if (unknown.empty()) return;
    throw CheckpointError(format("{}: has {} tensor{} that {} does not have: {}", folder_,
                                 unknown.size(), unknown.size() == 1 ? "" : "s", model_.describe(),
                                 some_of(unknown)));
  }

  // Some writers save the head of a tied model too.
  void require_same_head(const std::string& name) {
    const std::string& embedding = parts_.at("embed.weight").front().theirs;
    const auto head = directory_.find(name), table = directory_.find(embedding);
    if (head.dtype == table.dtype && std::ranges::equal(head.bytes, table.bytes)) return;
    throw CheckpointError(
        format("{}: {} differs from {}, but config.json has tie_word_embeddings true", folder_,
               name, embedding));
  }

  void require_form(const TensorSpec& tensor, const HfPart& part) {
    const formats::HfTensor found = directory_.find(part.theirs);
    const auto dtype = formats::dtype_of(found.dtype);
    if (!dtype || !is_floating(*dtype)) {
      throw CheckpointError(
          format("{}: {} has dtype {}, must be a floating one", folder_, part.theirs, found.dtype));
    }
    layout::Shape shape = tensor.shape;
    shape[0] = part.rows.size();
    if (part.transposed) std::swap(shape.at(0), shape.at(1));
    if (found.shape != shape) {
      throw CheckpointError(format("{}: {} is {}, must be {} for {} of {}", folder_, part.theirs,
                                   layout::describe(found.shape), layout::describe(shape),
                                   part.ours, model_.describe()));
    }
  }

  std::string folder_;
  formats::HfDirectory directory_;
  ModelSpec model_;
  std::map<std::string, std::vector<HfPart>> parts_;  // by our names; theirs as in the folder
  std::vector<std::string> used_;                     // their names
};

TrainConfig config_of(const ModelSpec& model, const std::string& folder) {
  TrainConfig config;
  config.model = model;
  config.train.seq_len = std::min(config.train.seq_len, model.positions);
  config.model_path = folder;
  config.data.tokenizer = tokenizer_name(config);
  config.model_path.clear();
  return config;
}

// A save that fails leaves nothing behind.
class Unfinished {
 public:
  explicit Unfinished(std::string folder) : folder_(std::move(folder)) {}
  ~Unfinished() {
    try {
      io::remove_tree(folder_);
    } catch (const Error&) {  // the failure that brought us here is the one to report
    }
  }
  Unfinished(const Unfinished&) = delete;
  Unfinished& operator=(const Unfinished&) = delete;

 private:
  std::string folder_;
};

}  // namespace

HfImported import_hf(const std::string& folder, const std::string& dir,
                     const HfImportOptions& options) {
  const ModelSpec model = model_in(folder);
  require_safetensors(folder);
  if (const auto others = formats::list_complete(dir); !others.empty()) {
    throw ConfigError(format("{} has checkpoints already, up to step {}; choose another folder",
                             dir, others.back().step));
  }
  Weights weights(folder, model);
  HfImported imported{.config = config_of(model, folder)};

  io::MadeFolders made(dir);
  const io::FolderLock lock(dir);
  const std::string temporary = formats::begin_checkpoint(dir, 0);
  const Unfinished unfinished(temporary);  // after the commit there is nothing under this name
  std::vector<formats::ShardSlice> slices;
  for (const TensorSpec& tensor : model.tensors()) {
    slices.push_back({tensor.name, formats::safetensors_name(options.dtype), tensor.shape,
                      layout::Box::whole(tensor.shape)});
  }
  const std::string file = formats::shard_file_name(1);
  auto writer = formats::open_shard(temporary, file, slices);
  const auto entries = writer.entries();
  for (const auto& entry : entries) {
    imported.overflowed += weights.write(entry.name, options.dtype, writer);
  }
  auto manifest = formats::shard_manifest(0, file, writer.finish(), slices);
  manifest.state = {{"samples", "0"}, {"tokens", "0"}};
  manifest.config = to_json(imported.config);
  imported.path = formats::commit_checkpoint(dir, manifest, &lock);
  made.keep();
  imported.tensors = static_cast<int64_t>(slices.size());
  return imported;
}

}  // namespace lockstep::config
