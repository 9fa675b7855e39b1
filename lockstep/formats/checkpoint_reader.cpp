#include "lockstep/formats/checkpoint_reader.h"

#include <cstring>
#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/safetensors.h"

namespace lockstep::formats {
namespace {

using layout::Box;

}  // namespace

class CheckpointReader::File {
 public:
  explicit File(const std::string& path) : file_(path) {}

  const SafetensorsFile& contents() const { return file_; }

 private:
  SafetensorsFile file_;
};

CheckpointReader::CheckpointReader(std::string path, bool verify)
    : path_(std::move(path)), manifest_(read_manifest(path_)), verify_(verify) {}

CheckpointReader::~CheckpointReader() = default;

CheckpointReader::File& CheckpointReader::open(const std::string& name) {
  const auto found = files_.find(name);
  if (found != files_.end()) return *found->second;
  const auto path = path_ + "/" + name;
  if (verify_ && record_of(path) != manifest_.files.at(name)) {
    throw CheckpointError(
        format("{}: does not have the size and checksum of the manifest: it is damaged", path));
  }
  return *files_.emplace(name, std::make_unique<File>(path)).first->second;
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
  if (!Box::whole(record.shape).contains(box) ||
      out.size() != static_cast<uint64_t>(box.numel()) * width) {
    throw ConfigError(format("{}: tensor {} {}: {} bytes for {} of it", path_, tensor,
                             layout::describe(record.shape), out.size(), box.describe()));
  }
  for (const SliceRecord& slice : record.slices) {
    const Box shared = box.intersect(slice.box);
    if (shared.empty()) continue;
    const SafetensorsFile& file = open(slice.file).contents();
    const auto& entry = file.at(slice.key.empty() ? tensor : slice.key);
    if (entry.dtype != record.dtype || entry.shape != slice_shape(record.shape, slice.box)) {
      throw CheckpointError(format("{}: tensor {} is {} {}, the manifest says {} {}", file.path(),
                                   entry.name, entry.dtype, layout::describe(entry.shape),
                                   record.dtype,
                                   layout::describe(slice_shape(record.shape, slice.box))));
    }
    const auto bytes = file.bytes(entry);
    layout::for_each_run(shared, slice.box, box, [&](const layout::Run& run) {
      const uint64_t size = static_cast<uint64_t>(run.size) * width;
      std::memcpy(out.data() + static_cast<uint64_t>(run.to) * width,
                  bytes.data() + static_cast<uint64_t>(run.from) * width, size);
      bytes_read_ += size;
    });
  }
}

}  // namespace lockstep::formats
