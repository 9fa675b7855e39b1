// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <charconv>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/manifest.h"
#include "lockstep/io/crc32c.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {
namespace {

constexpr const char* kFormat = "lockstep.checkpoint";
constexpr int64_t kVersion = 2;

std::string seal(std::string_view body) {
  return format(",\n\"crc32c\": \"{:08x}\"\n}}\n", io::crc32c(std::as_bytes(std::span(body))));
}

uint32_t parse_crc(const io::Json& value, const std::string& origin) {
  const std::string text = value.is_string() ? value.get<std::string>() : value.dump();
  uint32_t crc = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), crc, 16);
  if (!value.is_string() || text.size() != 8 || error != std::errc() || end != text.data() + 8) {
    throw CheckpointError(format("{}: crc32c {} must be 8 hexadecimal digits", origin, text));
  }
  return crc;
}

layout::Shape parse_numbers(const io::Json& object, const char* key, const std::string& origin) {
  const auto& array = io::member(object, key, origin);
  if (!array.is_array()) throw CheckpointError(format("{}: {} must be an array", origin, key));
  layout::Shape numbers;
  for (const auto& value : array)
    numbers.push_back(io::integer(value, format("{}: {}", origin, key)));
  return numbers;
}

SliceRecord parse_slice(const io::Json& object, const TensorRecord& tensor,
                        const std::string& origin) {
  io::require_only(object, {"file", "offsets", "shape"}, origin);
  SliceRecord slice;
  slice.file = io::string_member(object, "file", origin);
  const auto offsets = parse_numbers(object, "offsets", origin);
  const auto shape = parse_numbers(object, "shape", origin);
  if (offsets.size() != tensor.shape.size() || shape.size() != tensor.shape.size()) {
    throw CheckpointError(
        format("{}: offsets and shape must have {} numbers each", origin, tensor.shape.size()));
  }
  for (size_t dim = 0; dim < shape.size(); ++dim) {
    // Sizes above the tensor's are refused here, where the sum below could overflow.
    if (offsets[dim] > tensor.shape[dim] || shape[dim] > tensor.shape[dim] - offsets[dim]) {
      throw CheckpointError(format("{}: offsets {} and shape {} reach outside the tensor's {}",
                                   origin, layout::describe(offsets), layout::describe(shape),
                                   layout::describe(tensor.shape)));
    }
    slice.box.ranges.push_back({offsets[dim], offsets[dim] + shape[dim]});
  }
  if (tensor.shape.empty()) slice.box = layout::Box::whole({});
  return slice;
}

TensorRecord parse_tensor(const io::Json& object, const std::string& origin) {
  io::require_only(object, {"dtype", "shape", "slices"}, origin);
  TensorRecord tensor;
  tensor.dtype = io::string_member(object, "dtype", origin);
  tensor.shape = parse_numbers(object, "shape", origin);
  const auto& slices = io::member(object, "slices", origin);
  if (!slices.is_array()) throw CheckpointError(format("{}: slices must be an array", origin));
  for (const auto& slice : slices) {
    tensor.slices.push_back(parse_slice(slice, tensor, origin + ": a slice"));
  }
  return tensor;
}

io::FileRecord parse_file(const io::Json& object, const std::string& origin) {
  io::require_only(object, {"bytes", "crc32c"}, origin);
  const auto& checksums = io::member(object, "crc32c", origin);
  if (!checksums.is_array()) throw CheckpointError(format("{}: crc32c must be an array", origin));
  io::FileRecord record{
      static_cast<uint64_t>(io::integer(io::member(object, "bytes", origin), origin))};
  for (const auto& value : checksums) record.blocks.push_back(parse_crc(value, origin));
  return record;
}

// One member a line, so that a manifest can be read, searched and compared with plain tools.
class Lines {
 public:
  explicit Lines(std::string& text) : text_(text) { text_ += "{\n"; }
  void add(const std::string& key, const std::string& value) {
    text_ += (first_ ? "" : ",\n") + io::Json(key).dump() + ": " + value;
    first_ = false;
  }

 private:
  std::string& text_;
  bool first_ = true;
};

template <class Map, class ToText>
std::string lines_of(const Map& map, const ToText& to_text) {
  std::string text;
  Lines lines(text);
  for (const auto& [key, value] : map) lines.add(key, to_text(key, value));
  return text + (map.empty() ? "}" : "\n}");
}

std::string file_text(const io::FileRecord& record) {
  std::string checksums;
  for (const uint32_t crc : record.blocks) {
    checksums += format("{}\"{:08x}\"", checksums.empty() ? "" : ",", crc);
  }
  return format(R"({{"bytes":{},"crc32c":[{}]}})", record.bytes, checksums);
}

std::string tensor_text(const TensorRecord& tensor) {
  auto slices = io::Json::array();
  for (const auto& slice : tensor.slices) {
    slices.push_back({{"file", slice.file},
                      {"offsets", slice_offsets(tensor.shape, slice.box)},
                      {"shape", slice_shape(tensor.shape, slice.box)}});
  }
  return io::Json{{"dtype", tensor.dtype}, {"shape", tensor.shape}, {"slices", std::move(slices)}}
      .dump();
}

// The caller's JSON, checked and without white space.
std::string compact(const std::string& text, const std::string& what) {
  try {
    return io::parse_json(text, what).dump();
  } catch (const CheckpointError& failure) {
    throw ConfigError(failure.what());
  }
}

}  // namespace

std::string Manifest::to_json() const {
  try {
    std::string body;
    Lines lines(body);
    lines.add("format", io::Json(kFormat).dump());
    lines.add("version", format("{}", kVersion));
    lines.add("step", format("{}", step));
    lines.add("config", compact(config, "[manifest] config"));
    lines.add("state", lines_of(state, [](const auto& key, const auto& value) {
                return compact(value, "[manifest] state " + key);
              }));
    lines.add("files",
              lines_of(files, [](const auto&, const auto& record) { return file_text(record); }));
    lines.add("tensors", lines_of(tensors, [](const auto&, const auto& tensor) {
                return tensor_text(tensor);
              }));
    return body + seal(body);
  } catch (const io::Json::exception& failure) {
    throw ConfigError("[manifest] names must be UTF-8: " + io::reason_of(failure));
  }
}

Manifest Manifest::part_from_json(std::string_view text, const std::string& origin) {
  const auto json = io::parse_json(text, origin);
  if (io::string_member(json, "format", origin) != kFormat) {
    throw CheckpointError(format("{}: is not a checkpoint's manifest", origin));
  }
  // Before anything else that another version may have changed.
  const auto version = io::integer(io::member(json, "version", origin), origin + ": version");
  if (version != kVersion) {
    throw CheckpointError(
        format("{}: version {}, this Lockstep reads version {}", origin, version, kVersion));
  }
  const auto sealed = seal({}).size();
  const auto body = text.substr(0, text.size() - std::min(text.size(), sealed));
  if (text.substr(body.size()) != seal(body)) {
    throw CheckpointError(format("{}: does not match its checksum: damaged, or edited", origin));
  }
  io::require_only(
      json, {"format", "version", "step", "config", "state", "files", "tensors", "crc32c"}, origin);
  Manifest manifest;
  manifest.step = io::integer(io::member(json, "step", origin), origin + ": step");
  manifest.config = io::member(json, "config", origin).dump();
  for (const auto& [key, value] : io::object_member(json, "state", origin).items()) {
    manifest.state.emplace(key, value.dump());
  }
  for (const auto& [name, value] : io::object_member(json, "files", origin).items()) {
    manifest.files.emplace(name, parse_file(value, format("{}: file {}", origin, name)));
  }
  for (const auto& [name, value] : io::object_member(json, "tensors", origin).items()) {
    manifest.tensors.emplace(name, parse_tensor(value, format("{}: tensor {}", origin, name)));
  }
  return manifest;
}

Manifest Manifest::from_json(std::string_view text, const std::string& origin) {
  auto manifest = part_from_json(text, origin);
  manifest.validate(origin);
  return manifest;
}

}  // namespace lockstep::formats
