#include <map>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/safetensors.h"

namespace lockstep::formats {
namespace {

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
      contents[slice.file][slice.key.empty() ? name : slice.key] = {
          tensor.dtype, slice_shape(tensor.shape, slice.box)};
    }
  }
  return contents;
}

void verify_header(const std::string& path, const std::map<std::string, Expected>& expected) {
  const SafetensorsFile file(path);
  for (const auto& [name, slice] : expected) {
    const auto& entry = file.at(name);
    if (entry.dtype != slice.dtype || entry.shape != slice.shape) {
      throw CheckpointError(format("{}: tensor {} is {} {}, the manifest says {} {}", path, name,
                                   entry.dtype, layout::describe(entry.shape), slice.dtype,
                                   layout::describe(slice.shape)));
    }
  }
  for (const auto& entry : file.entries()) {
    if (expected.count(entry.name) == 0) {
      throw CheckpointError(format("{}: tensor {} is not in the manifest", path, entry.name));
    }
  }
}

}  // namespace

Manifest verify(const std::string& path) {
  auto manifest = read_manifest(path);
  auto contents = contents_of(manifest);
  for (const auto& [name, record] : manifest.files) {
    const auto file = path + "/" + name;
    const auto found = record_of(file);
    if (found != record) {
      throw CheckpointError(
          format("{}: {} bytes with CRC32C {:08x}, the manifest says {} with {:08x}", file,
                 found.bytes, found.crc32c, record.bytes, record.crc32c));
    }
    if (name.ends_with(".safetensors") || contents.count(name) != 0) {
      verify_header(file, contents[name]);
    }
  }
  return manifest;
}

}  // namespace lockstep::formats
