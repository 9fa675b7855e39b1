// SPDX-License-Identifier: Apache-2.0
#include "lockstep/config/run_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <system_error>

#include "lockstep/config/input_files.h"
#include "lockstep/config/model_source.h"
#include "lockstep/config/run_tokenizer.h"
#include "lockstep/config/schema/schema_text.h"
#include "lockstep/core/error.h"
#include "lockstep/core/fd.h"
#include "lockstep/core/format.h"
#include "lockstep/core/log.h"
#include "lockstep/formats/checkpoint_folder.h"
#include "lockstep/io/durable.h"

namespace lockstep::config {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRuns = "runs";
constexpr const char* kConfig = "config.toml";
constexpr const char* kNextConfig = ".config.next.toml";
constexpr const char* kJob = ".job";
constexpr const char* kCheckpoints = "checkpoints";
constexpr const char* kBest = "best";
// A folder with one of these has a run already.
constexpr const char* kOwn[] = {kConfig,        "environment.jsonl", "metrics.jsonl",
                                "events.jsonl", "log.txt",           kCheckpoints};

bool is_word(const std::string& path) {
  return path.empty() || path == "auto" || path == "none" || path == "bytes";
}

std::string absolute(const std::string& path) {
  if (is_word(path)) return path;
  const fs::path normal = fs::absolute(path).lexically_normal();
  return (normal.has_filename() ? normal : normal.parent_path()).string();
}

bool has_checkpoint(const std::string& folder) {
  return !folder.empty() && !formats::list_complete(folder).empty();
}

// When a process began, in clock ticks since the host was started.
std::string start_of(pid_t pid) {
  std::ifstream file(format("/proc/{}/stat", pid));
  std::string text((std::istreambuf_iterator<char>(file)), {});
  std::istringstream fields(text.substr(std::min(text.rfind(')') + 1, text.size())));
  std::string field;
  for (int i = 3; i <= 22 && fields >> field; ++i) continue;
  return field;
}

// The same for all restarts of a job, and for no other job: our launcher draws a name for it; that
// of torchrun may be the same for all, so its process counts too.
std::string job_of(const RankEnv& env) {
  const char* const id = std::getenv("TORCHELASTIC_RUN_ID");
  if (id == nullptr) return {};
  if (env.launcher == Launcher::lockstep) return id;
  if (env.launcher != Launcher::torchrun) return {};
  return format("{} {} {} {}", id, host_name(), getppid(), start_of(getppid()));
}

std::string read_job(const std::string& folder) {
  std::ifstream file(format("{}/{}", folder, kJob));
  std::string job;
  std::getline(file, job);
  return job;
}

// The folder that an earlier attempt of this job made; empty: none did.
std::string folder_of_job(const std::string& dir, const std::string& job) {
  if (job.empty()) return {};
  if (dir != "auto") return read_job(dir) == job ? dir : std::string();
  std::error_code error;
  for (fs::directory_iterator entry(kRuns, error), end; !error && entry != end;
       entry.increment(error)) {
    if (read_job(entry->path().string()) == job) return entry->path().string();
  }
  return {};
}

std::string newest_run() {
  std::string newest;
  std::error_code error;
  for (fs::directory_iterator entry(kRuns, error), end; !error && entry != end;
       entry.increment(error)) {
    if (is_run_folder(entry->path().string())) newest = std::max(newest, entry->path().string());
  }
  return newest;
}

bool holds_a_run(const std::string& folder) {
  std::error_code error;
  return std::any_of(std::begin(kOwn), std::end(kOwn), [&](const char* name) {
    return fs::exists(format("{}/{}", folder, name), error);
  });
}

// Whether a start in this folder has come to its first step. Otherwise another may have the folder.
bool has_made_a_step(const std::string& folder) {
  const std::string named = is_run_folder(folder) ? read_run_config(folder).metrics.file : "auto";
  std::ifstream metrics(named == "auto" ? format("{}/metrics.jsonl", folder) : named);
  for (std::string line; std::getline(metrics, line);) {
    if (line.find("\"loss\"") != std::string::npos) return true;
  }
  return has_checkpoint(is_run_folder(folder) ? checkpoint_folder(folder)
                                              : format("{}/{}", folder, kCheckpoints));
}

// "20261117-174512-gpt"
std::string new_name(const TrainConfig& config) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char stamp[32];
  std::strftime(stamp, sizeof stamp, "%Y%m%d-%H%M%S", &local);
  const std::string model =
      config.model_path.empty() ? "" : fs::path(absolute(config.model_path)).filename().string();
  if (!model.empty()) return format("{}-{}", stamp, model);
  return format("{}-{}", stamp, config.model.kind == ModelKind::gpt ? "gpt" : "llama");
}

// Two runs that begin in the same second get two folders.
std::string make_new(const std::string& name) {
  io::make_folders(kRuns);
  for (int number = 1;; ++number) {
    const std::string path =
        number == 1 ? format("{}/{}", kRuns, name) : format("{}/{}-{}", kRuns, name, number);
    if (mkdir(path.c_str(), 0777) == 0) return path;
    if (errno != EEXIST) throw SystemError("cannot make " + path, errno);
  }
}

// Of two runs that begin in one folder at the same time, the second fails.
void claim(const std::string& file) {
  const Fd made(open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (made.valid()) return;
  if (errno != EEXIST) throw SystemError("cannot write " + file, errno);
  throw ConfigError(
      format("run.dir: another run has just made {}; choose another --run.dir", file));
}

// "section.key = value" for each key that differs.
std::string differences(TrainConfig before, TrainConfig after) {
  const Schema old = train_schema(before), now = train_schema(after);
  std::string lines;
  for (size_t i = 0; i < now.sections().size(); ++i) {
    const Section &was = old.sections()[i], &is = now.sections()[i];
    for (size_t j = 0; j < is.options.size(); ++j) {
      const Value value = is.options[j].get();
      if (value == was.options[j].get()) continue;
      lines += format("{} = {}\n", is.options[j].name, toml_literal(value));
    }
  }
  return lines;
}

}  // namespace

std::string run_config_file(const std::string& folder) { return format("{}/{}", folder, kConfig); }

bool is_run_folder(const std::string& path) {
  std::error_code error;
  return !is_word(path) && fs::is_regular_file(run_config_file(path), error);
}

TrainConfig read_run_config(const std::string& folder) {
  TrainConfig config;
  train_schema(config).read_file(run_config_file(folder));
  return config;
}

TrainConfig read_next_run_config(const std::string& folder) {
  const std::string next = format("{}/{}", folder, kNextConfig);
  TrainConfig config;
  train_schema(config).read_file(fs::exists(next) ? next : run_config_file(folder));
  return config;
}

void commit_run_config(const std::string& folder) {
  const std::string next = format("{}/{}", folder, kNextConfig);
  if (fs::exists(next)) io::rename_path(next, run_config_file(folder));
}

bool same_folder(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) && !error;
}

PlaceInRun place_in_run(const std::string& path) {
  if (is_word(path)) return {};
  if (is_run_folder(path)) return {.run = path};
  const fs::path whole = absolute(path), above = whole.parent_path();
  const auto is_run = [](const fs::path& folder) { return is_run_folder(folder.string()); };
  if (whole.filename() == kCheckpoints && is_run(above)) return {.run = shown_path(above)};
  if (above.filename() == kCheckpoints && is_run(above.parent_path()))
    return {.run = shown_path(above.parent_path()), .checkpoint = path};
  if (whole.filename() != kBest || !is_run(above) || fs::exists(whole)) return {};
  const std::string run = shown_path(above);
  return {.run = run, .checkpoint = format("{}/{}", checkpoint_folder(run), kBest)};
}

std::string checkpoint_path(const std::string& path) {
  const PlaceInRun place = place_in_run(path);
  const std::string& found = place.checkpoint.empty() ? path : place.checkpoint;
  std::error_code error;
  if (!fs::exists(found, error)) throw ConfigError(format("there is no folder {}", path));
  return found;
}

std::string checkpoint_folder(const std::string& path) {
  if (!is_run_folder(path)) return path;
  const std::string dir = read_run_config(path).checkpoint.dir;
  return dir.empty() || dir == "auto" ? format("{}/{}", path, kCheckpoints) : dir;
}

std::string shown_path(const std::string& path) {
  const fs::path relative = fs::path(path).lexically_proximate(fs::current_path());
  return relative.empty() || relative.is_absolute() || *relative.begin() == ".."
             ? path
             : relative.string();
}

RunFolder::RunFolder(const TrainArguments& arguments, const RankEnv& env)
    : arguments_(arguments),
      asked_(arguments.config),
      config_(arguments.config),
      start_(arguments.config.checkpoint),
      job_(job_of(env)),
      launched_(env.launcher != Launcher::none) {
  std::string& dir = config_.run.dir;
  const std::string& continued = arguments_.continued;
  const std::string own = env.restart_count > 0 ? folder_of_job(dir, job_) : "";
  if (continued.empty()) {
    begin(own);
  } else {
    begin_from(continued);
  }
  if (dir.empty()) {
    place();
    if (env.restart_count > 0) resume_own_checkpoints(config_);
    return;
  }
  const bool goes_on = !continued.empty() && arguments_.checkpoint.empty() &&
                       (dir == "auto" || same_folder(dir, continued));
  if (!own.empty() || goes_on) {
    is_new_ = false;
    dir = absolute(own.empty() ? continued : own);
    place();
    resume_own_checkpoints(config_);
    return;
  }
  if (dir == "auto") {
    if (config_.checkpoint.resume != "auto" || config_.checkpoint.dir != "auto") return;
    const std::string newest = newest_run();
    throw ConfigError(format(
        "checkpoint.resume is auto, but run.dir and checkpoint.dir name no folder to look "
        "in; name one with --run.dir{}",
        newest.empty() ? "" : format(", or resume the newest run with --resume {}", newest)));
  }
  dir = absolute(dir);
  if (!holds_a_run(dir)) return;
  if (config_.checkpoint.resume != "auto" && has_made_a_step(dir)) {
    throw ConfigError(
        format("run.dir: {} holds another run; continue it with --resume {}, or choose another "
               "--run.dir",
               dir, shown_path(dir)));
  }
  is_new_ = config_.checkpoint.resume != "auto" && !is_run_folder(dir);
  place();
}

// As the arguments say. A restart takes what the first start has found: the weights that it began
// with may be gone.
void RunFolder::begin(const std::string& own) {
  const std::string& resume = asked_.checkpoint.resume;
  if (own.empty() || !is_run_folder(own)) {
    complete_model(asked_, arguments_.origins);
  } else if (!asked_.model_path.empty() || !is_word(resume)) {
    const TrainConfig before = read_next_run_config(own);
    asked_.model = before.model;
    asked_.data.tokenizer = before.data.tokenizer;
    asked_.train.seq_len = before.train.seq_len;
  }
  config_ = asked_;
}

// As in that folder, but for what the arguments change.
void RunFolder::begin_from(const std::string& folder) {
  const TrainConfig before = read_run_config(folder);
  start_ = before.checkpoint;
  const std::string tokenizer = tokenizer_name(config_);
  const std::string& named = arguments_.checkpoint;
  const std::string checkpoints = named.empty() ? checkpoint_folder(folder) : checkpoint_at(named);
  const bool begun = !named.empty() || has_checkpoint(checkpoints);
  if (begun) {
    config_.checkpoint.resume = absolute(checkpoints);
    // The weights are in the checkpoint.
    if (!config_.model_path.empty() && absolute(config_.model_path) != before.model_path)
      refuse_two_sources(config_.model_path, arguments_.config.checkpoint.resume);
    config_.model_path.clear();
    const auto found = named.empty() ? formats::newest_complete(checkpoints)
                                     : std::optional(formats::Checkpoint{.path = checkpoints});
    if (found) {
      const std::string& path = found->path;
      const auto manifest = manifest_at(path);
      take_model(config_, arguments_.origins, manifest, path);
      const TrainConfig saved = train_config_from_json(manifest.config, path);
      const auto copy = kept_tokenizer(absolute(folder), tokenizer_crc(manifest, path));
      if (copy && tokenizer == saved.data.tokenizer) config_.data.tokenizer = *copy;
    }
  } else {
    log::warn(format("{} has no checkpoint yet: the run starts from its beginning", folder));
    config_.checkpoint.resume = before.checkpoint.resume;
    config_.checkpoint.load = before.checkpoint.load;
    config_.checkpoint.partial = before.checkpoint.partial;
    const std::string copy = absolute(folder + "/tokenizer.json");
    if (tokenizer == before.data.tokenizer && fs::exists(copy)) config_.data.tokenizer = copy;
    if (is_word(config_.checkpoint.resume)) complete_model(config_, arguments_.origins);
  }
  if (named.empty() && (config_.run.dir == "auto" || same_folder(config_.run.dir, folder))) return;
  // Another folder: what that run wrote stays as it is.
  for (TrainConfig* config : {&config_, &asked_}) {
    if (config->checkpoint.dir == before.checkpoint.dir) config->checkpoint.dir = "auto";
    if (config->metrics.file == before.metrics.file) config->metrics.file = "auto";
  }
  if (!begun) return;
  start_ = config_.checkpoint;
  asked_.model_path.clear();
}

// Puts files into the folder, once its path is known.
void RunFolder::place() {
  const auto in_folder = [&](std::string& path, const char* name) {
    if (path == "auto") path = config_.run.dir.empty() ? "" : config_.run.dir + "/" + name;
  };
  in_folder(config_.checkpoint.dir, kCheckpoints);
  in_folder(config_.metrics.file, "metrics.jsonl");
  if (config_.run.dir.empty()) return;  // validate() refuses what asks for a place in no folder
  in_folder(config_.metrics.trace, "traces");
  in_folder(config_.metrics.tensorboard, "tensorboard");
}

TrainConfig RunFolder::stored(const ModelSpec& model) const {
  TrainConfig config = asked_;
  config.run.dir = "auto";
  if (launched_) config.run.ranks = config.run.min_ranks = config.run.max_restarts = 0;
  config.model = model;
  config.data.tokenizer = tokenizer_name(config);
  config.checkpoint.resume = start_.resume;
  config.checkpoint.load = start_.load;
  config.checkpoint.partial = start_.partial;
  config.checkpoint.other_data = false;
  for (std::string* path :
       {&config.model_path, &config.data.path, &config.memory.disk, &config.offload.disk,
        &config.parallel.schedule_file, &config.checkpoint.dir, &config.checkpoint.resume,
        &config.metrics.file, &config.metrics.trace, &config.metrics.tensorboard}) {
    *path = absolute(*path);
  }
  if (!config.data.validation_fraction()) config.data.validation = absolute(config.data.validation);
  return config;
}

void RunFolder::make() {
  std::string& dir = config_.run.dir;
  if (dir == "auto") {
    dir = absolute(make_new(new_name(config_)));
  } else {
    io::make_folders(dir);
  }
  place();
}

void RunFolder::write(const ModelSpec& model) {
  const std::string& dir = config_.run.dir;
  TrainConfig kept = stored(model);
  Schema schema = train_schema(kept);
  schema.restore(arguments_.origins);
  const std::string file = run_config_file(dir), temporary = format("{}.{}.tmp", file, getpid());
  io::write_text(temporary, toml_text(schema));
  if (is_new_) claim(file);
  io::rename_path(temporary, is_new_ ? file : format("{}/{}", dir, kNextConfig));
  if (!job_.empty()) io::write_text(format("{}/{}", dir, kJob), job_ + "\n");
  keep_tokenizer(config_, dir);
  log::copy_to(dir + "/log.txt");
}

std::string RunFolder::open(const ModelSpec& model) {
  try {
    if (!config_.run.dir.empty()) {
      if (is_new_) make();
      write(model);
    }
  } catch (const SystemError& failure) {
    throw ConfigError(format("run.dir: {}; choose another place with --run.dir", failure.what()));
  }
  return differences(arguments_.config, config_);
}

// In the folder of the run itself an older checkpoint will do where the newest is damaged.
bool resume_own_checkpoints(TrainConfig& config) {
  if (!has_checkpoint(config.checkpoint.dir)) return false;
  config.checkpoint.resume = "auto";
  config.checkpoint.load = LoadWhat::all;
  return true;
}

void adopt(TrainConfig& config, const std::string& settings) {
  train_schema(config).read_text(settings, "the settings of rank 0");
}

}  // namespace lockstep::config
