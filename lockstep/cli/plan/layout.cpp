// SPDX-License-Identifier: Apache-2.0
// `lockstep plan layout`: the fastest layouts of a run that fit, and why not another.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>

#include "lockstep/cli/plan/answer.h"
#include "lockstep/cli/plan/front_svg.h"
#include "lockstep/cli/plan/verbs.h"
#include "lockstep/config/plan/cluster_file.h"
#include "lockstep/config/plan/search.h"
#include "lockstep/config/tensor_parallel.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"
#include "lockstep/core/require.h"
#include "lockstep/core/size_text.h"

namespace lockstep::cli {
namespace {

using config::Prediction;
using config::SearchResult;
using Words = std::vector<std::string>;

constexpr int kMostRanks = 16384;

int whole_number(const Words& values, const char* name, int fallback) {
  if (values.empty()) return fallback;
  const auto number = config::parse_integer(values.back());
  require(
      number && *number >= 1 && *number <= kMostRanks,
      format("{} is '{}', must be a whole number from 1 to {}", name, values.back(), kMostRanks));
  return static_cast<int>(*number);
}

// The part of the step in which `slow` loses most against `fast`.
std::string why_slower(const Prediction& slow, const Prediction& fast) {
  const auto a = parts_of(slow.time), b = parts_of(fast.time);
  size_t most = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i].seconds - b[i].seconds > a[most].seconds - b[most].seconds) most = i;
  }
  return format("{:.1f} % slower, most of it {}: {} against {}",
                100 * (slow.time.total() / fast.time.total() - 1), a[most].name,
                seconds_text(a[most].seconds), seconds_text(b[most].seconds));
}

std::string explanation(const std::vector<Prediction>& best, size_t index, int64_t limit) {
  const Prediction& found = best[index];
  std::string text;
  auto parts = parts_of(found.time);
  std::ranges::sort(parts, std::ranges::greater(), &Part::seconds);
  const double total = found.time.total();
  for (size_t i = 0; i < 3 && parts[i].seconds > 0.005 * total; ++i)
    text +=
        format("{}{} {:.0f} %", i > 0 ? ", " : "", parts[i].name, 100 * parts[i].seconds / total);
  if (found.time.host > 0.02 * total) text += "; the host is the limit, not the device";
  if (static_cast<double>(found.memory) > 0.9 * static_cast<double>(limit))
    text += "; leaves less than a tenth of the memory, which counts as a tenth slower";
  if (index > 0) text += format("; {}", why_slower(found, best[0]));
  return text;
}

std::string table(const std::vector<Prediction>& best, const std::vector<size_t>& rows,
                  const config::ModelSpec& model, const plan::Cluster& cluster, int64_t limit) {
  size_t width = 6;
  for (const size_t i : rows) width = std::max(width, short_text(best[i]).size());
  std::string text = format(
      "{:>4}  {:<{}}  {:>9}  {:>9}  {:>6}  {:>8}  {:>8}  {:>8}  {:>8}  {:>9}\n", "rank", "layout",
      width, "step", "tokens/s", "MFU", "memory", "compute", "exposed", "bubble", "optimizer");
  for (const size_t i : rows) {
    const Prediction& found = best[i];
    const double total = found.time.total();
    const auto percent = [&](double part) { return format("{:.1f} %", 100 * part / total); };
    text += format(
        "{:>4}  {:<{}}  {:>9}  {:>9.4g}  {:>6}  {:>8}  {:>8}  {:>8}  {:>8}  {:>9}\n", i + 1,
        short_text(found), width, seconds_text(total), found.tokens_per_second(),
        format("{:.1f} %", 100 * plan::mfu(config::shape_of(model), found.layout, cluster, total)),
        size_text(found.memory), percent(found.time.compute + found.time.host),
        percent(found.time.communication()), percent(found.time.bubble),
        percent(found.time.optimizer));
  }
  return text + format("memory limit {} a device\n", size_text(limit));
}

// Why a layout is not the first: refused, too large, or slower.
std::string explain(const std::string& flags, const Request& request, const SearchResult& result,
                    const plan::Cluster& cluster, int64_t limit) {
  std::istringstream stream(flags);
  Words words;
  for (std::string word; stream >> word;) words.push_back(word);
  config::TrainConfig config = request.config;
  if (config.train.global_batch == 0)
    config.train.global_batch = config.train.micro_batch * request.world / config.parallel.cp;
  try {
    config::Schema schema = config::train_schema(config);
    for (size_t i = 0; i < words.size(); i += 2) {
      require(words[i].starts_with("--") && i + 1 < words.size(),
              format("--explain: '{}' must be --section.key VALUE", words[i]));
      schema.set_flag(words[i].substr(2), words[i + 1]);
    }
    config.validate(request.world);
    config::validate_tensor(config, request.model);
  } catch (const ConfigError& error) {
    return format("refused: {}", error.what());
  }
  const Prediction found = config::predict(config, request.model, request.world, cluster);
  if (found.memory > limit)
    return format("too large: rank {} takes {}, {} more than {}", found.largest_rank,
                  size_text(found.memory), size_text(found.memory - limit), size_text(limit));
  if (result.best.empty()) return "fits, and is the only one";
  const double first = config::ranked_time(result.best[0], limit);
  if (config::ranked_time(found, limit) <= first) return "is as fast as the first";
  if (found.time.total() <= result.best[0].time.total())
    return "is as fast as the first, but leaves less than a tenth of the memory";
  return why_slower(found, result.best[0]);
}

// Throws: what is the least that is needed, and how many ranks would do.
[[noreturn]] void refuse(const Request& request, const SearchResult& result,
                         const std::vector<int>& worlds, const plan::Cluster& cluster,
                         int64_t limit) {
  if (result.candidates == 0)
    throw ConfigError(format(
        "no layout of {} is allowed for this model: heads {}, key-value heads {}, ffn {}, "
        "layers {} and the global batch {} must be divisible; use another -n",
        counted(worlds.back(), "rank"), request.model.heads, request.model.num_kv_heads(),
        request.model.ffn_size(), request.model.layers,
        request.config.train.global_batch > 0
            ? request.config.train.global_batch
            : request.config.train.micro_batch * worlds.back() / request.config.parallel.cp));
  std::string nearest = "no number of ranks that was tried would do";
  config::TrainConfig config = request.config;
  if (config.train.global_batch == 0)
    config.train.global_batch = config.train.micro_batch * worlds.back() / config.parallel.cp;
  for (int more = 2 * worlds.back(); more <= 1024; more *= 2) {
    const auto found =
        config::search_layouts(config, request.model, request.origins, {more}, cluster);
    if (found.best.empty()) continue;
    nearest = format("-n {} would fit: {} with {}", more,
                     config::layout_flags(found.best[0].config), size_text(found.best[0].memory));
    break;
  }
  throw ConfigError(
      format("no layout of {} fits in {}: of {} layouts the smallest takes about {} ({}); {}",
             counted(worlds.back(), "rank"), size_text(limit), result.candidates,
             size_text(result.least_memory), result.smallest, nearest));
}

void write_svg(const std::string& path, const SearchResult& result, const Request& request,
               const plan::Cluster& cluster) {
  std::ofstream file(path);
  const Prediction& first = result.best[0];
  std::optional<plan::Timeline> timeline;
  if (first.layout.dims.pp > 1)
    timeline = plan::timeline_of(config::shape_of(request.model), first.layout, cluster);
  file << front_svg(result.best, config::pareto_front(result.best), timeline);
  require(file.good(), format("{} cannot be written", path));
}

std::vector<int> worlds_of(int ranks, int most) {
  if (ranks > 0) return {ranks};
  std::vector<int> worlds;
  for (int world = 1; world < most; world *= 2) worlds.push_back(world);
  worlds.push_back(most);
  return worlds;
}

}  // namespace

int plan_layout(Words arguments) {
  const bool json = take_switch(arguments, "--json");
  const Words svg = take_values(arguments, "--svg"), why = take_values(arguments, "--explain");
  const Words names = take_values(arguments, "--cluster");
  const int most = whole_number(take_values(arguments, "--max-ranks"), "--max-ranks", 0);
  const int top = whole_number(take_values(arguments, "--top"), "--top", 10);
  auto request = read_open_request(arguments);
  if (!request) return 0;
  require(request->world > 0 || most > 0,
          "plan layout: the number of ranks is missing; give -n N or --max-ranks N");
  require(request->world == 0 || most == 0,
          format("plan layout: -n {} and --max-ranks {} exclude each other", request->world, most));
  const plan::Cluster cluster = config::cluster_for(names.empty() ? "" : names.back()).cluster;
  const int64_t limit = config::memory_limit(request->config, cluster);
  const std::vector<int> worlds = worlds_of(request->world, most);
  if (request->world == 0) request->world = most;
  const SearchResult result =
      config::search_layouts(request->config, request->model, request->origins, worlds, cluster);
  if (result.best.empty()) refuse(*request, result, worlds, cluster, limit);
  if (!svg.empty()) write_svg(svg.back(), result, *request, cluster);
  if (json) {
    Json list = Json::array();
    for (const Prediction& found : result.best) {
      list.push_back(to_json(found, request->model, cluster));
      list.back()["flags"] = config::layout_flags(found.config);
      if (list.size() == static_cast<size_t>(std::max(top, 3))) break;
    }
    for (size_t i = 0; i < list.size(); ++i)
      if (i < 3) list[i]["explanation"] = explanation(result.best, i, limit);
    std::cout << list.dump(2) << "\n";
    return 0;
  }
  std::vector<size_t> rows;
  for (size_t i = 0; i < result.best.size() && i < static_cast<size_t>(top); ++i) rows.push_back(i);
  std::cout << format("{} on {}: {} layouts, {} too large; cluster: {}, {}\n",
                      request->model.describe(), counted(request->world, "rank"), result.candidates,
                      result.too_large, cluster.name, cluster.note)
            << table(result.best, rows, request->model, cluster, limit);
  for (size_t i = 0; i < std::min<size_t>(3, result.best.size()); ++i)
    std::cout << format("{}: {}\n   {}\n", i + 1, explanation(result.best, i, limit),
                        config::layout_flags(result.best[i].config));
  std::cout << "front of time and memory:\n"
            << table(result.best, config::pareto_front(result.best), request->model, cluster,
                     limit);
  for (const std::string& flags : why)
    std::cout << format("{}: {}\n", flags, explain(flags, *request, result, cluster, limit));
  return 0;
}

}  // namespace lockstep::cli
