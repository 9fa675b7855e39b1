// SPDX-License-Identifier: Apache-2.0
#include "lockstep/formats/checkpoint_reader.h"

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checked_file.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"

namespace lockstep::formats {

using layout::Box;

// What a file's header says. Kept for every file that was used; the file itself is open only while
// it is the last that was, since a checkpoint may have more files than a process can open.
struct CheckpointReader::Contents {
  uint64_t data_begin = 0;
  std::map<std::string, SafetensorsEntry> entries = {};
};

CheckpointReader::CheckpointReader(std::string path, bool verify)
    : path_(std::move(path)), manifest_(read_manifest(path_)), verify_(verify) {}

CheckpointReader::~CheckpointReader() = default;

const CheckpointReader::Contents& CheckpointReader::open(const std::string& name) {
  const auto path = path_ + "/" + name;
  if (!file_ || file_->path() != path) {
    bytes_read_ = bytes_read();
    file_.reset();
    file_ = std::make_unique<CheckedFile>(path, manifest_.files.at(name), verify_);
  }
  const auto found = contents_.find(name);
  if (found != contents_.end()) return found->second;
  auto header = file_->header();
  Contents contents{header.data_begin};
  for (auto& entry : header.entries) {
    auto key = entry.name;
    contents.entries.emplace(std::move(key), std::move(entry));
  }
  return contents_.emplace(name, std::move(contents)).first->second;
}

uint64_t CheckpointReader::bytes_read() const {
  return bytes_read_ + (file_ ? file_->bytes_read() : 0);
}

uint64_t CheckpointReader::find(const std::string& tensor, const TensorRecord& record,
                                const SliceRecord& slice) {
  const Contents& contents = open(slice.file);
  const auto found = contents.entries.find(tensor);
  if (found == contents.entries.end()) {
    throw CheckpointError(format("{}: has no tensor {}", file_->path(), tensor));
  }
  const SafetensorsEntry& entry = found->second;
  const auto shape = slice_shape(record.shape, slice.box);
  if (entry.dtype != record.dtype || entry.shape != shape) {
    throw CheckpointError(format("{}: tensor {} is {} {}, the manifest says {} {}", file_->path(),
                                 tensor, entry.dtype, layout::describe(entry.shape), record.dtype,
                                 layout::describe(shape)));
  }
  return contents.data_begin + entry.begin;
}

void CheckpointReader::read(const std::string& tensor, const Box& box, std::span<std::byte> out) {
  const auto found = manifest_.tensors.find(tensor);
  if (found == manifest_.tensors.end()) {
    throw ConfigError(format("{}: has no tensor {}", path_, tensor));
  }
  const TensorRecord& record = found->second;
  const auto dtype = dtype_of(record.dtype);
  if (!dtype) {
    throw CheckpointError(
        format("{}: tensor {} is of type {}, which is unknown", path_, tensor, record.dtype));
  }
  const uint64_t width = size_of(*dtype);
  const Box whole = Box::whole(record.shape);
  if (box.ranges.size() != whole.ranges.size() || !whole.contains(box) ||
      out.size() != static_cast<uint64_t>(box.numel()) * width) {
    throw ConfigError(format("{}: tensor {} {}: {} bytes for {} of it", path_, tensor,
                             layout::describe(record.shape), out.size(), box.describe()));
  }
  for (const SliceRecord& slice : record.slices) {
    const Box shared = box.intersect(slice.box);
    if (shared.empty()) continue;
    const uint64_t begin = find(tensor, record, slice);
    layout::for_each_run(shared, slice.box, box, [&](const layout::ContiguousRun& run) {
      file_->read(begin + static_cast<uint64_t>(run.from) * width,
                  out.subspan(static_cast<uint64_t>(run.to) * width,
                              static_cast<uint64_t>(run.size) * width));
    });
  }
}

}  // namespace lockstep::formats
