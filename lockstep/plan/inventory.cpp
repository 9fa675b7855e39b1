#include "lockstep/plan/inventory.h"

#include <algorithm>
#include <numeric>

#include "lockstep/core/format.h"
#include "lockstep/core/size_text.h"
#include "lockstep/layout/partition_map.h"

namespace lockstep::plan {
namespace {

using config::TensorSpec;

std::string kind_of(std::string name) {
  const size_t dot = name.rfind('.');
  const std::string last = name.substr(dot + 1);
  name.resize(dot);
  if (name.find("norm") != std::string::npos) return "norms";
  if (last == "bias") return "biases";
  // "blocks.7.mlp.up": the number does not matter.
  if (name.starts_with("blocks.")) name.erase(7, name.find('.', 7) - 6);
  return name;
}

// Columns as wide as they must be; numbers to the right, but for the first `left`.
std::string table(const std::vector<std::vector<std::string>>& lines, size_t left) {
  std::vector<size_t> widths(lines[0].size(), 0);
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string text;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) {
      if (i > 0) text += "  ";
      text +=
          i < left ? format("{:<{}}", line[i], widths[i]) : format("{:>{}}", line[i], widths[i]);
    }
    text += '\n';
  }
  return text;
}

std::vector<std::string> line_of(const std::string& name, const Statistics& all) {
  return {name,
          format("{}", all.count),
          format("{}", all.elements),
          format("{:.0f}", all.mean),
          format("{:.0f}", all.median),
          format("{}", all.min),
          format("{}", all.max),
          size_text(all.bytes)};
}

}  // namespace

Statistics statistics_of(std::vector<int64_t> elements, int64_t element_bytes) {
  if (elements.empty()) return {};
  std::ranges::sort(elements);
  Statistics all{.count = static_cast<int64_t>(elements.size()),
                 .elements = std::accumulate(elements.begin(), elements.end(), int64_t{0}),
                 .min = elements.front(),
                 .max = elements.back()};
  all.mean = static_cast<double>(all.elements) / static_cast<double>(all.count);
  const size_t middle = elements.size() / 2;
  all.median = static_cast<double>(elements[middle]);
  if (elements.size() % 2 == 0)
    all.median = (static_cast<double>(elements[middle - 1]) + all.median) / 2;
  all.bytes = all.elements * element_bytes;
  return all;
}

std::vector<InventoryKind> inventory_of(std::span<const TensorSpec> tensors,
                                        int64_t element_bytes) {
  std::vector<std::string> names;
  std::vector<std::vector<int64_t>> sizes;
  for (const TensorSpec& tensor : tensors) {
    const std::string kind = kind_of(tensor.name);
    const auto at = static_cast<size_t>(std::ranges::find(names, kind) - names.begin());
    if (at == names.size()) {
      names.push_back(kind);
      sizes.emplace_back();
    }
    sizes[at].push_back(layout::numel_of(tensor.shape));
  }
  std::vector<InventoryKind> kinds;
  for (size_t i = 0; i < names.size(); ++i)
    kinds.push_back({names[i], statistics_of(sizes[i], element_bytes)});
  return kinds;
}

std::string inventory_table(std::span<const TensorSpec> tensors, int64_t element_bytes) {
  std::vector<std::vector<std::string>> lines{
      {"kind", "tensors", "elements", "mean", "median", "min", "max", "bytes"}};
  for (const auto& [name, statistics] : inventory_of(tensors, element_bytes))
    lines.push_back(line_of(name, statistics));
  std::vector<int64_t> all;
  for (const TensorSpec& tensor : tensors) all.push_back(layout::numel_of(tensor.shape));
  lines.push_back(line_of("all", statistics_of(all, element_bytes)));
  return table(lines, 1);
}

std::string tensor_list(std::span<const TensorSpec> tensors, int64_t element_bytes, int world) {
  const layout::PartitionMap map(static_cast<int64_t>(tensors.size()), world);
  std::vector<std::vector<std::string>> lines{{"tensor", "shape", "bytes", "owner"}};
  for (size_t i = 0; i < tensors.size(); ++i) {
    lines.push_back({tensors[i].name, layout::describe(tensors[i].shape),
                     size_text(layout::numel_of(tensors[i].shape) * element_bytes),
                     format("{}", map.owner(static_cast<int64_t>(i)))});
  }
  return table(lines, 2);
}

}  // namespace lockstep::plan
