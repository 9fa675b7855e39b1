// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checked_file.h"
#include "lockstep/formats/checkpoint_folder.h"

namespace lockstep::formats {
namespace {

constexpr uint64_t kBytesAtATime = 16 * io::kBlockBytes;  // read at a time

struct Expected {
  std::string dtype;
  layout::Shape shape;
};

// By file, then by the name in the file.
using Contents = std::map<std::string, std::map<std::string, Expected>>;

Contents contents_of(const Manifest& manifest) {
  Contents contents;
  for (const auto& [name, tensor] : manifest.tensors) {
    for (const auto& slice : tensor.slices) {
      contents[slice.file][name] = {tensor.dtype, slice_shape(tensor.shape, slice.box)};
    }
  }
  return contents;
}

void verify_header(CheckedFile& file, const std::map<std::string, Expected>& expected) {
  std::map<std::string, Expected> found;
  for (const auto& entry : file.header().entries) found[entry.name] = {entry.dtype, entry.shape};
  for (const auto& [name, slice] : expected) {
    const auto entry = found.find(name);
    if (entry == found.end()) {
      throw CheckpointError(format("{}: has no tensor {}", file.path(), name));
    }
    const auto& [dtype, shape] = entry->second;
    if (dtype != slice.dtype || shape != slice.shape) {
      throw CheckpointError(format("{}: tensor {} is {} {}, the manifest says {} {}", file.path(),
                                   name, dtype, layout::describe(shape), slice.dtype,
                                   layout::describe(slice.shape)));
    }
    found.erase(entry);
  }
  if (!found.empty()) {
    throw CheckpointError(
        format("{}: tensor {} is not in the manifest", file.path(), found.begin()->first));
  }
}

}  // namespace

Manifest verify(const std::string& path, const VerifyShare& files) {
  auto manifest = read_manifest(path);
  auto contents = contents_of(manifest);
  std::vector<std::byte> bytes;
  int number = 0;
  for (const auto& [name, record] : manifest.files) {
    if (number++ % files.shares != files.share) continue;
    CheckedFile file(path + "/" + name, record, true);
    for (uint64_t begin = 0; begin < record.bytes; begin += kBytesAtATime) {
      bytes.resize(std::min(kBytesAtATime, record.bytes - begin));
      file.read(begin, bytes);
    }
    if (name.ends_with(".safetensors") || contents.count(name) != 0) {
      verify_header(file, contents[name]);
    }
  }
  return manifest;
}

}  // namespace lockstep::formats
