// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/safetensors_writer.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/flight/recorder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/safetensors_header.h"
#include "lockstep/io/durable.h"
#include "lockstep/io/json.h"

namespace lockstep::formats {
namespace {

std::vector<SafetensorsEntry> lay_out(std::vector<SafetensorsTensor> tensors,
                                      const std::string& path) {
  std::sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return std::make_tuple(-type_order(a.dtype).value_or(-1), std::string_view(a.name)) <
           std::make_tuple(-type_order(b.dtype).value_or(-1), std::string_view(b.name));
  });
  std::set<std::string> names;
  std::vector<SafetensorsEntry> entries;
  uint64_t end = 0;
  for (auto& [name, dtype, shape] : tensors) {
    const auto size = byte_size(dtype, shape);
    if (!size || end + static_cast<uint64_t>(*size) > uint64_t{INT64_MAX}) {
      throw ConfigError(
          format("{}: tensor {} {} {}: needs a known type and a whole number of bytes "
                 "below 2^63",
                 path, name, dtype, layout::describe(shape)));
    }
    if (name == "__metadata__" || !names.insert(name).second) {
      throw ConfigError(format("{}: tensor {} is named twice or has a reserved name", path, name));
    }
    const auto begin = std::exchange(end, end + static_cast<uint64_t>(*size));
    entries.push_back({std::move(name), std::move(dtype), std::move(shape), begin, end});
  }
  return entries;
}

}  // namespace

SafetensorsWriter::SafetensorsWriter(std::string path, std::vector<SafetensorsTensor> tensors,
                                     const std::map<std::string, std::string>& metadata)
    : entries_(lay_out(std::move(tensors), path)) {
  std::string header;
  try {
    header = safetensors_header_text(entries_, metadata);
  } catch (const io::Json::exception& failure) {
    throw ConfigError(format("{}: names must be UTF-8: {}", path, io::reason_of(failure)));
  }
  const uint64_t data = entries_.empty() ? 0 : entries_.back().end;
  file_ = std::make_unique<io::DurableFile>(std::move(path), header.size() + data);
  file_->write(std::as_bytes(std::span(header)));
  skip_written();
}

SafetensorsWriter::~SafetensorsWriter() = default;
SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;
SafetensorsWriter& SafetensorsWriter::operator=(SafetensorsWriter&&) noexcept = default;

void SafetensorsWriter::skip_written() {
  while (current_ < entries_.size() && entries_[current_].end == written_) ++current_;
}

void SafetensorsWriter::write(std::string_view name, std::span<const std::byte> bytes) {
  if (bytes.empty()) return;
  if (current_ == entries_.size()) {
    throw ConfigError(format("{}: bytes of {} after all tensors are written", file_->path(), name));
  }
  const auto& due = entries_[current_];
  if (due.name != name || bytes.size() > due.end - written_) {
    throw ConfigError(format("{}: {} bytes of {} given, but {} bytes of {} are due", file_->path(),
                             bytes.size(), name, due.end - written_, due.name));
  }
  file_->write(bytes);
  flight::show_life();
  written_ += bytes.size();
  skip_written();
}

io::FileRecord SafetensorsWriter::finish() {
  if (current_ != entries_.size()) {
    throw ConfigError(format("{}: {} bytes of {} are missing", file_->path(),
                             entries_[current_].end - written_, entries_[current_].name));
  }
  return file_->finish();
}

}  // namespace lockstep::formats
