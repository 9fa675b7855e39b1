// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/safetensors_header.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <set>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {
namespace {

constexpr uint64_t kMaxHeader = 100'000'000;  // the reference reader's
constexpr size_t kMaxDims = 64;               // torch's own
constexpr const char* kMetadata = "__metadata__";

[[noreturn]] void fail(const std::string& path, const std::string& rule) {
  throw CheckpointError(format("{}: {}", path, rule));
}

// Takes the JSON as events, so that what does not belong is refused before it takes memory, and a
// key given twice is seen.
class HeaderSax : public nlohmann::json_sax<io::Json> {
 public:
  HeaderSax(const std::string& path, SafetensorsHeader& header) : path_(path), header_(header) {}

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override { return unexpected(format("{}", value)); }
  bool number_float(number_float_t /*value*/, const string_t& text) override {
    return unexpected(text);
  }
  bool binary(binary_t& /*value*/) override { return unexpected("bytes"); }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::array) return unexpected(format("{}", value));
    if (value > number_unsigned_t{INT64_MAX}) {
      fail_here(format("{} holds {}, must be below 2^63", field_, value));
    }
    const size_t limit = field_ == "shape" ? kMaxDims : 2;
    if (numbers_.size() == limit) fail_here(format("{} has more than {} numbers", field_, limit));
    numbers_.push_back(static_cast<int64_t>(value));
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::metadata) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(value));
      return true;
    }
    if (place_ != Place::tensor || field_ != "dtype") return unexpected("a string");
    if (!type_order(value)) fail_here(format("dtype {} is not known", value));
    tensor_.dtype = std::move(value);
    return true;
  }

  bool start_object(size_t /*size*/) override {
    if (place_ == Place::outside) {
      place_ = Place::header;
    } else if (place_ == Place::header) {
      place_ = tensor_.name == kMetadata ? Place::metadata : Place::tensor;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::header) {
      tensor_ = {};
      fields_.clear();
      if (!names_.insert(name).second) fail(path_, format("tensor {} is given twice", name));
      tensor_.name = std::move(name);
    } else if (place_ == Place::metadata) {
      if (header_.metadata.count(name) != 0) fail_here(format("key {} is given twice", name));
      metadata_key_ = std::move(name);
    } else {
      if (name != "dtype" && name != "shape" && name != "data_offsets") {
        fail_here(format("has an unknown member {}", name));
      }
      if (!fields_.insert(name).second) fail_here(format("{} is given twice", name));
      field_ = std::move(name);
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::tensor) {
      for (const char* field : {"dtype", "shape", "data_offsets"}) {
        if (fields_.count(field) == 0) fail_here(format("has no {}", field));
      }
      header_.entries.push_back(std::move(tensor_));
    }
    place_ = place_ == Place::header ? Place::outside : Place::header;
    return true;
  }

  bool start_array(size_t /*size*/) override {
    if (place_ != Place::tensor || field_ == "dtype" || field_.empty()) {
      return unexpected("an array");
    }
    place_ = Place::array;
    numbers_.clear();
    return true;
  }

  bool end_array() override {
    if (field_ == "shape") {
      tensor_.shape = numbers_;
    } else {
      if (numbers_.size() != 2) fail_here("data_offsets must be two numbers");
      if (numbers_[0] > numbers_[1]) {
        fail_here(format("data_offsets {} to {} run backwards", numbers_[0], numbers_[1]));
      }
      tensor_.begin = static_cast<uint64_t>(numbers_[0]);
      tensor_.end = static_cast<uint64_t>(numbers_[1]);
    }
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(size_t /*position*/, const std::string& /*token*/,
                   const io::Json::exception& failure) override {
    fail(path_, "the header is not valid JSON: " + io::reason_of(failure));
  }

 private:
  enum class Place { outside, header, metadata, tensor, array };

  bool unexpected(const std::string& value) {
    if (place_ == Place::outside) fail(path_, "the header must be an object");
    if (place_ == Place::metadata) fail_here(format("must hold strings only, has {}", value));
    if (place_ == Place::header) fail_here(format("must be an object, not {}", value));
    fail_here(format("{} must not hold {}", field_, value));
  }

  [[noreturn]] void fail_here(const std::string& rule) {
    fail(path_, (tensor_.name == kMetadata ? "" : "tensor ") + tensor_.name + ": " + rule);
  }

  const std::string& path_;
  SafetensorsHeader& header_;
  Place place_ = Place::outside;
  SafetensorsEntry tensor_;  // the one that is being read; its name is the last key of the header
  std::set<std::string> names_;
  std::set<std::string> fields_;
  std::string field_;
  std::string metadata_key_;
  std::vector<int64_t> numbers_;
};

// The tensors must tile the data: no hole, no overlap, no byte left.
void require_tiles(std::vector<SafetensorsEntry>& entries, uint64_t data_size,
                   const std::string& path) {
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  uint64_t end = 0;
  for (const auto& entry : entries) {
    const auto what =
        format("tensor {} {} {}", entry.name, entry.dtype, layout::describe(entry.shape));
    const auto size = byte_size(entry.dtype, entry.shape);
    if (!size) fail(path, format("{}: its size is not a whole number of bytes below 2^63", what));
    if (entry.size() != static_cast<uint64_t>(*size)) {
      fail(path, format("{}: data_offsets {} to {} hold {} bytes, must be {}", what, entry.begin,
                        entry.end, entry.size(), *size));
    }
    if (entry.begin != end) {
      fail(path, format("{}: begins at byte {}, but the tensor before it ends at {}", what,
                        entry.begin, end));
    }
    end = entry.end;
    if (end > data_size) {
      fail(path,
           format("{}: ends at byte {}, but the file has {} bytes of data", what, end, data_size));
    }
  }
  if (end != data_size) {
    fail(path,
         format("the tensors end at byte {}, but the file has {} bytes of data", end, data_size));
  }
}

}  // namespace

uint64_t safetensors_data_begin(std::span<const std::byte> first, uint64_t size,
                                const std::string& path) {
  if (size < 8 || first.size() < 8) {
    fail(path, format("{} bytes, a safetensors file has 8 or more", size));
  }
  uint64_t header = 0;
  std::memcpy(&header, first.data(), 8);
  if (header > kMaxHeader) {
    fail(path, format("a header of {} bytes, must be at most {}", header, kMaxHeader));
  }
  if (header > size - 8) fail(path, format("a header of {} bytes in a file of {}", header, size));
  return 8 + header;
}

SafetensorsHeader parse_safetensors(std::span<const std::byte> head, uint64_t size,
                                    const std::string& path) {
  SafetensorsHeader header;
  header.data_begin = safetensors_data_begin(head, size, path);
  check(header.data_begin <= head.size(), "a header is parsed as a whole");
  const std::string_view text(reinterpret_cast<const char*>(head.data() + 8),
                              header.data_begin - 8);
  if (text.empty() || text.front() != '{') fail(path, "the header must begin with {");
  // The parser takes a zero byte for the end of its input.
  if (text.find('\0') != std::string_view::npos) fail(path, "the header holds a zero byte");
  HeaderSax sax(path, header);
  io::Json::sax_parse(text.begin(), text.end(), &sax);
  require_tiles(header.entries, size - header.data_begin, path);
  return header;
}

std::string safetensors_header_text(std::span<const SafetensorsEntry> entries,
                                    const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto add = [&](const std::string& name, const std::string& value) {
    if (text.size() > 1) text += ',';
    text += io::Json(name).dump() + ':' + value;
  };
  if (!metadata.empty()) add(kMetadata, io::Json(metadata).dump());
  for (const auto& entry : entries) {
    add(entry.name, format(R"({{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", entry.dtype,
                           join(entry.shape, ","), entry.begin, entry.end));
  }
  text += '}';
  // Data begins at a multiple of 8, as the reference writer does it: with wide types first, every
  // tensor is aligned for its type, and files are the same byte for byte.
  text.resize((text.size() + 7) / 8 * 8, ' ');
  if (text.size() > kMaxHeader) {
    throw ConfigError(format("[safetensors] {} tensors need a header of {} bytes, at most {}",
                             entries.size(), text.size(), kMaxHeader));
  }
  const uint64_t size = text.size();
  std::string file(8, '\0');
  std::memcpy(file.data(), &size, 8);
  return file + text;
}

}  // namespace lockstep::formats
