// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/hf/hf_export.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "lockstep/config/model/hf_model.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/saved_config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/input_file.h"
#include "lockstep/data/tokenizer/tokenizer.h"
#include "lockstep/formats/checkpoint_reader.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/elements.h"
#include "lockstep/formats/hf_writer.h"
#include "lockstep/io/json.h"
#include "lockstep/io/staged_folder.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;
using Json = io::OrderedJson;

constexpr int64_t kWriteElements = int64_t{1} << 20;  // elements that are converted at a time

// Every tensor of the model in the shape that it has, and no others except the optimizer's.
void require_model(const formats::Manifest& manifest, const ModelSpec& model,
                   const std::string& path) {
  std::set<std::string> known;
  for (const TensorSpec& tensor : model.tensors()) {
    known.insert(tensor.name);
    const auto found = manifest.tensors.find(tensor.name);
    if (found == manifest.tensors.end()) {
      throw CheckpointError(
          format("{}: has no tensor {}, which {} needs", path, tensor.name, name_of(model.kind)));
    }
    if (found->second.shape != tensor.shape) {
      throw CheckpointError(format("{}: tensor {} is {}, must be {} for {}", path, tensor.name,
                                   layout::describe(found->second.shape),
                                   layout::describe(tensor.shape), model.describe()));
    }
    const auto dtype = formats::dtype_of(found->second.dtype);
    if (!dtype || !is_floating(*dtype)) {
      throw CheckpointError(format("{}: tensor {} has dtype {}, must be a floating one", path,
                                   tensor.name, found->second.dtype));
    }
  }
  for (const auto& [name, record] : manifest.tensors) {
    if (name.starts_with("optim.") || known.contains(name)) continue;
    throw CheckpointError(
        format("{}: has a tensor {}, which {} does not have", path, name, name_of(model.kind)));
  }
}

// As save_pretrained names them: below "transformer." in GPT2LMHeadModel, but for the head.
std::string written_name(const ModelSpec& model, const HfPart& part) {
  const bool inside = model.kind == ModelKind::gpt && part.theirs != "lm_head.weight";
  return (inside ? "transformer." : "") + part.theirs;
}

// The tensors in their form, read from ours as they are asked for.
class Conversion {
 public:
  Conversion(formats::CheckpointReader& reader, const ModelSpec& model, std::optional<DType> dtype)
      : reader_(reader), dtype_(dtype) {
    for (const HfPart& part : hf_parts(model)) {
      layout::Shape shape = record(part).shape;
      shape[0] = part.rows.size();
      if (part.transposed) std::swap(shape.at(0), shape.at(1));
      const std::string name = written_name(model, part);
      tensors_.push_back({name, formats::safetensors_name(target(part)), shape});
      parts_.emplace(name, part);
    }
  }

  const std::vector<formats::SafetensorsTensor>& tensors() const { return tensors_; }
  int64_t overflowed() const { return overflowed_; }

  // config.json names one: that of the embeddings.
  DType dtype() const { return target(parts_.at(tensors_.front().name)); }

  void write(const std::string& name, const formats::ByteSink& sink) {
    const HfPart& part = parts_.at(name);
    layout::Box box = layout::Box::whole(record(part).shape);
    box.ranges[0] = part.rows;
    if (part.transposed) {
      write_transposed(part, box, sink);
      return;
    }
    for (const layout::Box& piece : layout::pieces(box, kWriteElements)) {
      convert(part, read(part, piece), sink);
    }
  }

 private:
  const formats::TensorRecord& record(const HfPart& part) const {
    return reader_.manifest().tensors.at(part.ours);
  }
  DType stored(const HfPart& part) const { return *formats::dtype_of(record(part).dtype); }
  DType target(const HfPart& part) const { return dtype_.value_or(stored(part)); }

  std::vector<std::byte> read(const HfPart& part, const layout::Box& box) {
    std::vector<std::byte> bytes(static_cast<size_t>(box.numel()) * size_of(stored(part)));
    reader_.read(part.ours, box, bytes);
    return bytes;
  }

  // The whole matrix is held: columns of it would be read from the disk once for each panel.
  void write_transposed(const HfPart& part, const layout::Box& box, const formats::ByteSink& sink) {
    const std::vector<std::byte> bytes = read(part, box);
    const formats::Matrix matrix{bytes, box.ranges[0].size(), box.ranges[1].size(),
                                 size_of(stored(part))};
    formats::transpose_in_pieces(matrix, kWriteElements, [&](std::span<const std::byte> piece) {
      convert(part, piece, sink);
    });
  }

  void convert(const HfPart& part, std::span<const std::byte> bytes,
               const formats::ByteSink& sink) {
    std::vector<std::byte> converted(bytes.size() / size_of(stored(part)) * size_of(target(part)));
    overflowed_ += formats::convert(stored(part), bytes, target(part), converted);
    sink(converted);
  }

  formats::CheckpointReader& reader_;
  std::optional<DType> dtype_;
  std::vector<formats::SafetensorsTensor> tensors_;
  std::map<std::string, HfPart> parts_;  // by their names, as written
  int64_t overflowed_ = 0;
};

// Whatever else a configuration names is not copied into a folder that will be given away.
bool is_tokenizer(const std::string& path) {
  const auto json = io::parse_json_line(read_text(path, io::kMaxJsonBytes));
  return json.is_object() && json.contains("model");
}

// The tokenizer.json that the checkpoint was trained with, if it is there.
std::string tokenizer_file(const std::string& name) {
  if (name == "bytes" || name == "auto") return {};
  std::error_code error;
  const std::string file = fs::is_directory(name, error) ? name + "/tokenizer.json" : name;
  return fs::is_regular_file(file, error) && is_tokenizer(file) ? file : std::string();
}

void copy_file(const std::string& from, const io::StagedFolder& folder, const std::string& name) {
  folder.write(name, read_text(from, io::kMaxJsonBytes));
}

// None where there is no tokenizer, or one that only others can read.
std::optional<int32_t> end_of_text(const std::string& tokenizer, const std::string& model_folder) {
  if (tokenizer.empty()) return std::nullopt;
  try {
    return data::Tokenizer::from_file(tokenizer, model_folder).end_of_text();
  } catch (const ConfigError&) {
    return std::nullopt;
  }
}

// An object; null where there is no file, or another one of that name.
io::Json read_object(const std::string& path) {
  if (path.empty()) return nullptr;
  io::Json json = io::parse_json_line(read_text(path, io::kMaxJsonBytes));
  return json.is_object() ? json : io::Json(nullptr);
}

// One id or a list of them, as config.json has them. Null where it names none, or one that the
// vocabulary does not reach.
Json token_ids(const io::Json& config, const char* key, int64_t vocab) {
  if (!config.is_object() || !config.contains(key)) return nullptr;
  const io::Json &value = config[key], ids = value.is_array() ? value : io::Json{value};
  const bool reached = std::ranges::all_of(ids, [&](const io::Json& id) {
    return id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(vocab);
  });
  return reached ? Json::parse(value.dump()) : Json(nullptr);
}

// Files that accompany the weights. The tokenizer is empty where it is not there.
void write_descriptions(const io::StagedFolder& folder, const ModelSpec& model, DType dtype,
                        const std::string& tokenizer, const SavedTokenizer& saved) {
  Json config = Json::parse(hf_config_json(model));
  // transformers 5 and 4
  for (const char* key : {"dtype", "torch_dtype"}) config[key] = name_of(dtype);
  // Null, not absent: else theirs are those of the original vocabulary, which ours may not reach.
  const io::Json before = read_object(saved.files.config);
  for (const char* key : {"bos_token_id", "eos_token_id"})
    config[key] = token_ids(before, key, model.vocab);
  if (const auto end = end_of_text(tokenizer, saved.model_folder);
      end && config["eos_token_id"].is_null()) {
    config["eos_token_id"] = *end;
  }
  folder.write("config.json", config.dump(2) + "\n");
  if (read_object(saved.files.generation_config).is_object())
    copy_file(saved.files.generation_config, folder, "generation_config.json");
  if (tokenizer.empty()) return;
  copy_file(tokenizer, folder, "tokenizer.json");
  if (!saved.files.tokenizer_config.empty())
    copy_file(saved.files.tokenizer_config, folder, "tokenizer_config.json");
}

}  // namespace

HfExported export_hf(const std::string& checkpoint, const std::string& out,
                     const HfExportOptions& options) {
  formats::CheckpointReader reader(checkpoint);
  const TrainConfig config = saved_config(reader.manifest(), checkpoint);
  require_model(reader.manifest(), config.model, checkpoint);
  Conversion conversion(reader, config.model, options.dtype);
  const SavedTokenizer saved = saved_tokenizer(reader.manifest(), checkpoint);
  const std::string tokenizer = tokenizer_file(saved.name);
  io::StagedFolder folder(out, {.replaces = options.replace ? "config.json" : ""});
  write_descriptions(folder, config.model, conversion.dtype(), tokenizer, saved);
  const formats::HfFiles written = formats::write_hf_model(
      folder.folder(), conversion.tensors(),
      [&](const std::string& name, const formats::ByteSink& sink) { conversion.write(name, sink); },
      options.max_file_bytes);
  folder.commit();
  return {.model = config.model,
          .dtype = conversion.dtype(),
          .tensors = static_cast<int64_t>(conversion.tensors().size()),
          .files = written.files,
          .bytes = written.bytes,
          .overflowed = conversion.overflowed(),
          .tokenizer = tokenizer,
          .trained_with = config.data.tokenizer};
}

}  // namespace lockstep::config
