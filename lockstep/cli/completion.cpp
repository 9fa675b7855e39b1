// SPDX-License-Identifier: Apache-2.0
#include "lockstep/cli/completion.h"

#include <algorithm>
#include <regex>
#include <sstream>

#include "lockstep/config/train_config.h"
#include "lockstep/core/error.h"
#include "lockstep/core/format.h"

namespace lockstep::cli {
namespace {

using Words = std::vector<std::string>;

struct Flag {
  Words names = {};
  bool takes_value = false;
  Words values = {};  // that it may have; empty: any
  std::string help = {};
};

struct Command {
  std::string name;  // "checkpoint inspect"; empty: lockstep itself
  std::vector<Flag> flags;
  std::vector<std::pair<std::string, std::string>> verbs;  // and what they do
};

// ---- what there is ----

Words split(const std::string& text, char separator) {
  Words parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(part);
  return parts;
}

std::string first_sentence(const std::string& text) {
  const size_t end = text.find(". ");
  std::string sentence = end == std::string::npos ? text : text.substr(0, end);
  if (sentence.ends_with('.')) sentence.pop_back();
  return sentence;
}

// "  --backend TEXT:{thread,shm}=shm", with what it does in the same line or the next.
std::vector<Flag> flags_in(const std::string& help) {
  static const std::regex line(
      R"(^  (-[^ ]+(?:, -[^ ]+)?)(?: ([A-Z][^ ]*))?(?: \.\.\.)?(?: REQUIRED)?(?:\s+(.*))?$)");
  std::vector<Flag> flags;
  std::istringstream lines(help);
  bool has_text = true;
  for (std::string text; std::getline(lines, text);) {
    std::smatch found;
    if (std::regex_match(text, found, line)) {
      Flag flag{.takes_value = found[2].matched, .help = first_sentence(found[3])};
      for (std::string& name : split(std::regex_replace(found[1].str(), std::regex(" "), ""), ','))
        flag.names.push_back(std::move(name));
      const std::string type = found[2];
      if (const size_t open = type.find('{'); open != std::string::npos)
        flag.values = split(type.substr(open + 1, type.find('}') - open - 1), ',');
      has_text = !flag.help.empty();
      flags.push_back(std::move(flag));
    } else if (!has_text && !flags.empty()) {
      flags.back().help =
          first_sentence(text.substr(std::min(text.find_first_not_of(' '), text.size())));
      has_text = true;
    }
  }
  return flags;
}

std::vector<Flag> train_flags() {
  std::vector<Flag> flags{{{"-n"}, true, {}, "Number of ranks to start on this machine"},
                          {{"--config"}, true, {}, "Configuration file, TOML or JSON"},
                          {{"--print-config"}, false, {}, "Print the configuration, then exit"},
                          {{"-h", "--help"}, false, {}, "Print the help, then exit"}};
  config::TrainConfig defaults;
  const config::Schema schema = config::train_schema(defaults);
  for (const config::Section& section : schema.sections()) {
    for (const config::Option& option : section.options) {
      Flag flag{{"--" + option.name}, true, option.choices, first_sentence(option.help)};
      if (!option.alias.empty()) flag.names.push_back("--" + option.alias);
      if (option.type == config::OptionType::boolean) flag.values = {"true", "false"};
      if (option.automatic && !flag.values.empty()) flag.values.emplace_back("auto");
      flags.push_back(std::move(flag));
    }
  }
  return flags;
}

// A usage line that mentions --section.key takes all flags of train.
Command command_of(const std::string& name, const std::string& help) {
  Command command{.name = name, .flags = flags_in(help), .verbs = {}};
  if (help.find("--section.key") == std::string::npos) return command;
  command.flags = train_flags();
  if (help.find(format("lockstep {} [--list]", name)) != std::string::npos)
    command.flags.push_back({{"--list"}, false, {}, "List every tensor"});
  return command;
}

std::vector<Command> all_commands(const std::vector<HelpSource>& sources) {
  Command root{.name = "",
               .flags = {{{"--help"}, false, {}, "Print the help, then exit"},
                         {{"--version"}, false, {}, "Print the version, then exit"},
                         {{"--completion"}, true, {"bash", "zsh", "fish"}, "Print a script"}},
               .verbs = {}};
  std::vector<Command> commands;
  for (const HelpSource& source : sources) {
    root.verbs.emplace_back(source.name, source.summary);
    const std::string help = source.help({"--help"});
    // "lockstep checkpoint inspect DIR": verbs of a command stand in its usage.
    const std::regex usage(format("(?:Usage:|\n      ) lockstep {} ([a-z]+)", source.name));
    Command command{.name = source.name, .flags = {}, .verbs = {}};
    std::vector<Command> below;
    for (std::sregex_iterator at(help.begin(), help.end(), usage), end; at != end; ++at) {
      const std::string verb = (*at)[1], name = format("{} {}", source.name, verb);
      const std::string text = source.help({verb, "--help"});
      command.verbs.emplace_back(verb, first_sentence(text.substr(0, text.find('\n'))));
      below.push_back(command_of(name, text));
    }
    if (below.empty()) command = command_of(source.name, help);
    commands.push_back(std::move(command));
    commands.insert(commands.end(), below.begin(), below.end());
  }
  commands.insert(commands.begin(), std::move(root));
  return commands;
}

// ---- scripts ----

std::string quoted(const std::string& text) {
  return "'" + std::regex_replace(text, std::regex("'"), "'\\''") + "'";
}

// bash and zsh: the case labels of a command's flags, "'train:--dtype'|'train:--train.dtype'".
std::string labels(const Command& command, const Words& names) {
  Words quoted_names;
  for (const std::string& name : names)
    quoted_names.push_back(quoted(format("{}:{}", command.name, name)));
  return join(quoted_names, "|");
}

std::string known_names(const std::vector<Command>& commands, const char* separator) {
  Words names;
  for (const Command& command : commands)
    if (!command.name.empty()) names.push_back(quoted(command.name));
  return join(names, separator);
}

// The words of `$words` up to the cursor decide which command it is; those of a program that
// `lockstep run` starts begin again. Ends inside the case of what may follow.
std::string find_command(const std::vector<Command>& commands) {
  return format(
      "    case \"$word\" in lockstep|*/lockstep) command=''; continue ;; esac\n"
      "    candidate=\"${{command:+$command }}$word\"\n"
      "    case \"$candidate\" in\n      {}) command=$candidate ;;\n    esac\n  done\n"
      "  case \"$command:$previous\" in\n",
      known_names(commands, "|"));
}

// `list` makes the shell's list of texts.
std::string value_cases(const std::vector<Command>& commands,
                        const std::function<std::string(const Words&)>& list) {
  std::string text;
  for (const Command& command : commands) {
    Words files;
    for (const Flag& flag : command.flags) {
      if (!flag.takes_value) continue;
      if (flag.values.empty()) {
        files.insert(files.end(), flag.names.begin(), flag.names.end());
      } else {
        text += format("    {}) replies={} ;;\n", labels(command, flag.names), list(flag.values));
      }
    }
    if (!files.empty()) text += format("    {}) ;;\n", labels(command, files));
  }
  return text;
}

std::string bash_script(const std::vector<Command>& commands) {
  const auto list = [](const Words& words) { return quoted(join(words, " ")); };
  std::string text =
      "# Completion of lockstep for bash, printed by `lockstep --completion bash`.\n"
      "_lockstep() {\n"
      "  local command='' candidate word replies='' previous=${COMP_WORDS[COMP_CWORD-1]}\n"
      "  for word in \"${COMP_WORDS[@]:1:COMP_CWORD-1}\"; do\n";
  text += find_command(commands) + value_cases(commands, list);
  text += "    *) case \"$command\" in\n";
  for (const Command& command : commands) {
    Words words;
    for (const auto& [verb, help] : command.verbs) words.push_back(verb);
    for (const Flag& flag : command.flags)
      words.insert(words.end(), flag.names.begin(), flag.names.end());
    text += format("      {}) replies={} ;;\n", quoted(command.name), list(words));
  }
  return text +
         "    esac ;;\n"
         "  esac\n"
         "  COMPREPLY=($(compgen -W \"$replies\" -- \"${COMP_WORDS[COMP_CWORD]}\"))\n"
         "}\n"
         "complete -o default -F _lockstep lockstep\n";
}

std::string zsh_script(const std::vector<Command>& commands) {
  const auto list = [](const Words& words) {
    Words quoted_words;
    for (const std::string& word : words) quoted_words.push_back(quoted(word));
    return "(" + join(quoted_words, " ") + ")";
  };
  const auto entry = [](const std::string& name, const std::string& help) {
    return format("{}:{}", name, help);
  };
  std::string text =
      "#compdef lockstep\n"
      "# Completion of lockstep for zsh, printed by `lockstep --completion zsh`.\n"
      "_lockstep() {\n"
      "  local command='' candidate word previous=${words[CURRENT-1]}\n"
      "  local -a replies\n"
      "  for word in ${words[2,CURRENT-1]}; do\n";
  text += find_command(commands) + value_cases(commands, list);
  text += "    *) case \"$command\" in\n";
  for (const Command& command : commands) {
    Words words;
    for (const auto& [verb, help] : command.verbs) words.push_back(entry(verb, help));
    for (const Flag& flag : command.flags)
      for (const std::string& name : flag.names) words.push_back(entry(name, flag.help));
    text += format("      {}) replies={} ;;\n", quoted(command.name), list(words));
  }
  return text +
         "    esac ;;\n"
         "  esac\n"
         "  if (( $#replies )); then _describe lockstep replies; else _files; fi\n"
         "}\n"
         "_lockstep \"$@\"\n";
}

std::string fish_script(const std::vector<Command>& commands) {
  std::string text = format(
      "# Completion of lockstep for fish, printed by `lockstep --completion fish`.\n"
      "function __lockstep_at\n"
      "    set -l command ''\n"
      "    set -l words (commandline -opc)\n"
      "    for word in $words\n"
      "        if string match -q -r '(^|/)lockstep$' -- $word\n"
      "            set command ''\n"
      "            continue\n"
      "        end\n"
      "        set -l candidate (string trim -- \"$command $word\")\n"
      "        contains -- \"$candidate\" {}; and set command $candidate\n"
      "    end\n"
      "    test \"$command\" = \"$argv[1]\"\n"
      "end\n",
      known_names(commands, " "));
  for (const Command& command : commands) {
    const std::string at =
        format("complete -c lockstep -n \"__lockstep_at {}\"", quoted(command.name));
    for (const auto& [verb, help] : command.verbs)
      text += format("{} -f -a {} -d {}\n", at, verb, quoted(help));
    for (const Flag& flag : command.flags) {
      text += at;
      for (const std::string& name : flag.names)
        text += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
      if (!flag.values.empty()) {
        text += format(" -x -a {}", quoted(join(flag.values, " ")));
      } else if (flag.takes_value) {
        text += " -r";
      }
      text += format(" -d {}\n", quoted(flag.help));
    }
  }
  return text;
}

}  // namespace

std::string completion_script(const std::string& shell, const std::vector<HelpSource>& sources) {
  const auto commands = all_commands(sources);
  if (shell == "bash") return bash_script(commands);
  if (shell == "zsh") return zsh_script(commands);
  if (shell == "fish") return fish_script(commands);
  throw ConfigError(format("--completion is '{}', must be bash, zsh or fish", shell));
}

}  // namespace lockstep::cli
