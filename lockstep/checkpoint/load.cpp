#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include "lockstep/checkpoint/checkpoint.h"
#include "lockstep/checkpoint/exchange.h"
#include "lockstep/comm/tensor.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/formats/dtype_names.h"
#include "lockstep/formats/safetensors.h"

namespace lockstep::checkpoint {
namespace {

at::ScalarType scalar_type(const std::string& dtype, const std::string& name) {
  const auto known = formats::dtype_of(dtype);
  if (!known)
    throw CheckpointError(format("[load] {} has dtype {}, which is unknown", name, dtype));
  return comm::detail::to_scalar_type(*known);
}

// "a, b, c and 4 more"
std::string listed(const std::vector<std::string>& names) {
  constexpr size_t kShown = 5;
  const std::vector<std::string> first(names.begin(),
                                       names.begin() + std::min(kShown, names.size()));
  const size_t more = names.size() - first.size();
  return join(first) + (more > 0 ? format(" and {} more", more) : "");
}

// What some rank asks for. Collective.
std::set<std::string> names_of_all(const std::vector<NamedSlice>& slices,
                                   const comm::Group& group) {
  std::string mine;
  for (const NamedSlice& slice : slices) mine += slice.placement.name + '\n';
  std::set<std::string> names;
  for (const std::string& text : detail::exchange_texts(mine, group)) {
    std::istringstream lines(text);
    for (std::string name; std::getline(lines, name);) names.insert(name);
  }
  return names;
}

void compare(const formats::Manifest& manifest, const std::vector<NamedSlice>& slices,
             const std::set<std::string>& wanted, const std::string& path,
             const LoadOptions& options) {
  std::vector<std::string> missing, misshapen, extra;
  for (const NamedSlice& slice : slices) {
    const auto& [name, shape, box, replicated, sharded] = slice.placement;
    const auto found = manifest.tensors.find(name);
    if (found == manifest.tensors.end()) {
      missing.push_back(name);
    } else if (found->second.shape != shape) {
      misshapen.push_back(format("{} is {} there, {} here", name,
                                 layout::describe(found->second.shape), layout::describe(shape)));
    }
  }
  for (const auto& [name, record] : manifest.tensors) {
    const auto ignored = [&](const std::string& prefix) { return name.starts_with(prefix); };
    if (!wanted.contains(name) && std::ranges::none_of(options.may_ignore, ignored)) {
      extra.push_back(name);
    }
  }
  std::string problem;
  const auto add = [&](const char* what, const std::vector<std::string>& names) {
    if (!names.empty())
      problem += (problem.empty() ? "" : "; ") + format("{}: {}", what, listed(names));
  };
  add("it lacks", missing);
  add("of another shape", misshapen);
  add("the model has no", extra);
  if (!problem.empty()) {
    throw CheckpointError(format("[load] {} is not a checkpoint of this model: {}", path, problem));
  }
}

// A view of the part of `tensor`, which holds `held`, that `box` is.
at::Tensor part_of(at::Tensor tensor, const layout::Box& held, const layout::Box& box) {
  if (tensor.dim() == 0) return tensor;
  for (size_t dim = 0; dim < box.ranges.size(); ++dim) {
    tensor = tensor.narrow(static_cast<int64_t>(dim),
                           box.ranges[dim].begin - held.ranges[dim].begin, box.ranges[dim].size());
  }
  return tensor;
}

class Files {
 public:
  Files(std::string path, const formats::Manifest& manifest, bool verify)
      : path_(std::move(path)), manifest_(manifest), verify_(verify) {}

  // The stored slice as a tensor over the mapped file.
  at::Tensor read(const std::string& name, const formats::TensorRecord& tensor,
                  const formats::SliceRecord& slice) {
    const formats::SafetensorsFile& file = open(slice.file);
    const auto& entry = file.at(slice.key.empty() ? name : slice.key);
    const layout::Shape shape = formats::slice_shape(tensor.shape, slice.box);
    if (entry.dtype != tensor.dtype || entry.shape != shape) {
      throw CheckpointError(format("[load] {}: {} is {} {}, the manifest has {} {}", file.path(),
                                   entry.name, entry.dtype, layout::describe(entry.shape),
                                   tensor.dtype, layout::describe(shape)));
    }
    const auto bytes = file.bytes(entry);
    // Only ever read; torch has no tensors of constant memory.
    return at::from_blob(const_cast<std::byte*>(bytes.data()), shape,
                         scalar_type(entry.dtype, name));
  }

 private:
  const formats::SafetensorsFile& open(const std::string& name) {
    const auto found = open_.find(name);
    if (found != open_.end()) return found->second;
    const std::string path = path_ + "/" + name;
    if (verify_ && formats::record_of(path) != manifest_.files.at(name)) {
      throw CheckpointError(format(
          "[load] {} does not have the size and checksum of the manifest: it is damaged", path));
    }
    return open_.emplace(name, formats::SafetensorsFile(path)).first->second;
  }

  std::string path_;
  const formats::Manifest& manifest_;
  bool verify_;
  std::map<std::string, formats::SafetensorsFile> open_;
};

}  // namespace

formats::Manifest load(const std::string& path, const std::vector<NamedSlice>& slices,
                       const comm::Group& group, const LoadOptions& options) {
  const at::NoGradGuard no_grad;
  std::optional<formats::Manifest> manifest;
  const std::set<std::string> wanted = names_of_all(slices, group);
  detail::together("load", group, [&]() -> std::string {
    manifest = formats::read_manifest(path);
    compare(*manifest, slices, wanted, path, options);
    return "";
  });
  detail::together("load", group, [&]() -> std::string {
    Files files(path, *manifest, options.verify);
    for (const NamedSlice& slice : slices) {
      const auto& record = manifest->tensors.at(slice.placement.name);
      for (const formats::SliceRecord& stored : record.slices) {
        const layout::Box shared = slice.placement.slice.intersect(stored.box);
        if (shared.empty()) continue;
        const at::Tensor source = files.read(slice.placement.name, record, stored);
        part_of(slice.tensor, slice.placement.slice, shared)
            .copy_(part_of(source, stored.box, shared));
      }
    }
    return "";
  });
  return *manifest;
}

}  // namespace lockstep::checkpoint
