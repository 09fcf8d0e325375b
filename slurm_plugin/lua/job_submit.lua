--[[
job_submit.lua: merges a user's Cadenza options as JSON into the job's comment.

A job opts in by `--cadenza[=key=value,...]`, by CADENZA in its environment, or by a comment that is a JSON object with
a "cadenza" key. The comment then begins with {"cadenza":{"v":1,"share":true,...} in exactly this form, which is all that
the SPANK plugin reads; other keys follow, unchanged byte by byte, and a plain text becomes the key "comment". Comments of
all other jobs are not changed.

/etc/cadenza/lua.conf names the partitions that Cadenza manages ("partitions=gpu,long") and the number of lanes of
their hosts ("lanes=2"). There, a managed job that may get several nodes is pinned to one lane, and one without a script
to lane 0. Every other job is pinned to lane 0, which is the cluster as it is without Cadenza. Updates by a job's owner
keep to the same rules. Without lua.conf no constraint is changed. No job is held, and no priority is changed: Slurm
starts every job.

Only wrong options, and constraints of jobs that do not share to which lane 0 cannot be added, are refused. Slurm is
built with any Lua from 5.1 to 5.4 (Debian with 5.1), so only features of 5.1 are used. See
https://slurm.schedmd.com/job_submit_plugins.html.
--]]

cadenza = {
  settings_file = "/etc/cadenza/lua.conf",
}

local COMMENT_BYTES = 1024 -- Slurm's own limit
local NO_VALUE = 4294967294 -- slurm.NO_VAL, also when slurmctld's table lacks it
local SPANK_OPTION = "_SLURM_SPANK_OPTION_cadenza_cadenza="
local WHOLE_NODES = { [0] = true, [2] = true, [3] = true, [4] = true } -- JOB_SHARED_NONE, _USER, _MCS, _TOPO

-- JSON ---------------------------------------------------------------------------------------------------------

local NULL, FRACTION = {}, {} -- values that no option can have
-- Every form of a character above ASCII, from RFC 3629, section 4.
local TAIL = "[\128-\191]"
local UTF8 = {
  "[\194-\223]" .. TAIL,
  "\224[\160-\191]" .. TAIL,
  "[\225-\236\238\239]" .. TAIL .. TAIL,
  "\237[\128-\159]" .. TAIL,
  "\240[\144-\191]" .. TAIL .. TAIL,
  "[\241-\243]" .. TAIL .. TAIL .. TAIL,
  "\244[\128-\143]" .. TAIL .. TAIL,
}
local ESCAPES = { b = "\b", f = "\f", n = "\n", r = "\r", t = "\t", ['"'] = '"', ["\\"] = "\\", ["/"] = "/" }
local parse_value

local function skip(text, at)
  return text:match("^[ \t\r\n]*()", at)
end

local function expect(text, at, character)
  if text:sub(at, at) ~= character then
    error("'" .. character .. "' expected at byte " .. at, 0)
  end
  return at + 1
end

local function is_utf8(text)
  for _, form in ipairs(UTF8) do
    text = text:gsub(form, " ")
  end
  return not text:find("[\128-\255]")
end

local function utf8_char(code)
  local function tail(shift)
    return 0x80 + math.floor(code / shift) % 0x40
  end
  if code < 0x80 then
    return string.char(code)
  elseif code < 0x800 then
    return string.char(0xC0 + math.floor(code / 0x40), tail(1))
  elseif code < 0x10000 then
    return string.char(0xE0 + math.floor(code / 0x1000), tail(0x40), tail(1))
  end
  return string.char(0xF0 + math.floor(code / 0x40000), tail(0x1000), tail(0x40), tail(1))
end

-- Returns the character of the escape at the backslash, and the position after it; surrogate pairs are joined.
local function parse_escape(text, at)
  local letter = text:sub(at + 1, at + 1)
  if ESCAPES[letter] then
    return ESCAPES[letter], at + 2
  end
  local code = tonumber(text:match("^u(%x%x%x%x)", at + 1) or error("bad escape at byte " .. at, 0), 16)
  local low = code >= 0xD800 and code < 0xDC00 and text:match("^\\u([dD][c-fC-F]%x%x)", at + 6)
  if low then
    return utf8_char(0x10000 + (code - 0xD800) * 0x400 + tonumber(low, 16) - 0xDC00), at + 12
  end
  return utf8_char(code), at + 6
end

local function parse_string(text, at)
  local parts = {}
  at = expect(text, at, '"')
  while true do
    local plain, stop = text:match('^([^"\\\1-\31]*)()', at)
    parts[#parts + 1] = plain
    if text:sub(stop, stop) ~= "\\" then
      return table.concat(parts), expect(text, stop, '"')
    end
    parts[#parts + 1], at = parse_escape(text, stop)
  end
end

local function parse_number(text, at)
  local digits, stop = text:match("^(-?%d+%.?%d*[eE]?[+-]?%d*)()", at)
  local well_formed = digits
    and not digits:find("^-?0%d")
    and (digits:find("^-?%d+$") or digits:find("^-?%d+%.%d+$") or digits:find("^-?%d+[eE][+-]?%d+$")
      or digits:find("^-?%d+%.%d+[eE][+-]?%d+$"))
  if not well_formed then
    error("value expected at byte " .. at, 0)
  end
  return digits:find("^-?%d+$") and tonumber(digits) or FRACTION, stop
end

-- Calls `item` at the start of each element; it returns the position after the element.
local function parse_list(text, at, close, item)
  at = skip(text, at + 1)
  if text:sub(at, at) == close then
    return at + 1
  end
  while true do
    at = skip(text, item(at))
    if text:sub(at, at) ~= "," then
      return expect(text, at, close)
    end
    at = skip(text, at + 1)
  end
end

-- An object is the list of its members {key=, value=, start=, first=, last=}: start is the first byte of the key in its
-- quotes, first and last are the value's bytes.
local function parse_object(text, at, depth)
  local members = {}
  local stop = parse_list(text, at, "}", function(start)
    local member = { start = start }
    member.key, start = parse_string(text, start)
    member.first = skip(text, expect(text, skip(text, start), ":"))
    member.value, start = parse_value(text, member.first, depth + 1)
    member.last = start - 1
    members[#members + 1] = member
    return start
  end)
  return { members = members }, stop
end

local function parse_array(text, at, depth)
  local stop = parse_list(text, at, "]", function(start)
    local _, after = parse_value(text, start, depth + 1)
    return after
  end)
  return {}, stop
end

function parse_value(text, at, depth)
  local first = text:sub(at, at)
  if depth > 64 then
    error("nested too deep", 0)
  elseif first == "{" then
    return parse_object(text, at, depth)
  elseif first == "[" then
    return parse_array(text, at, depth)
  elseif first == '"' then
    return parse_string(text, at)
  end
  for word, value in pairs({ ["true"] = true, ["false"] = false, ["null"] = NULL }) do
    if text:sub(at, at + #word - 1) == word then
      return value, at + #word
    end
  end
  return parse_number(text, at)
end

-- Returns the members of a text that is one JSON object, else nil and the reason.
local function read_object(text)
  local ok, value = pcall(function()
    local start = skip(text, 1)
    expect(text, start, "{")
    local object, stop = parse_object(text, start, 1)
    if skip(text, stop) <= #text then
      error("text after the object at byte " .. stop, 0)
    end
    return object.members
  end)
  if ok then
    return value
  end
  return nil, value
end

-- Bytes that are not UTF-8 are read as Latin-1, so that the result is JSON.
local function quote(text)
  local unsafe = is_utf8(text) and '[\1-\31"\\]' or '[\1-\31"\\\128-\255]'
  return '"' .. text:gsub(unsafe, function(character)
    return string.format("\\u%04x", character:byte())
  end) .. '"'
end

-- Options ------------------------------------------------------------------------------------------------------

local function is_integer(low, high)
  return function(value)
    return type(value) == "number" and value >= low and value <= high
  end
end

local function is_model(value)
  return type(value) == "string" and #value <= 64 and value:find("^[%w._-]+$") ~= nil
end

local function is_batch(value)
  return value == "global" or value == "per-gpu"
end

local function is_boolean(value)
  return type(value) == "boolean"
end

-- In the order of writing; `why` is set here and never taken from a user.
local KEYS = {
  "v", "share", "late", "graphs", "summary", "checkpoints", "min_gpus", "max_gpus", "batch", "model", "priority",
  "iterations", "duration_s", "why",
}
local RULES = {
  v = { is_integer(1, 1), "must be 1" },
  share = { is_boolean, "must be true or false (yes or no in the flag)" },
  late = { is_boolean, "must be true or false (yes or no in the flag)" },
  graphs = { is_boolean, "must be true or false (yes or no in the flag)" },
  summary = { is_boolean, "must be true or false (yes or no in the flag)" },
  checkpoints = { is_boolean, "must be true or false (yes or no in the flag)" },
  min_gpus = { is_integer(1, 65535), "must be a number from 1 to 65535" },
  max_gpus = { is_integer(1, 65535), "must be a number from 1 to 65535" },
  batch = { is_batch, "must be global or per-gpu" },
  model = { is_model, "must be 1 to 64 of the characters A-Z a-z 0-9 . _ -" },
  priority = { is_integer(-1000000, 1000000), "must be a number from -1000000 to 1000000" },
  iterations = { is_integer(1, 2000000000), "must be a number from 1 to 2000000000" },
  duration_s = { is_integer(1, 2000000000), "must be a number from 1 to 2000000000" },
}
local function unknown(key)
  local keys = "share, late, graphs, summary, checkpoints, min_gpus, max_gpus, batch, model, priority, iterations, "
    .. "duration_s"
  return string.format("unknown key '%s' (known: %s)", key, keys)
end

local function check(options)
  for key, value in pairs(options) do
    if not RULES[key] then
      return unknown(key)
    elseif not RULES[key][1](value) then
      return key .. " " .. RULES[key][2]
    end
  end
  if options.min_gpus and options.max_gpus and options.min_gpus > options.max_gpus then
    return string.format("min_gpus=%d is more than max_gpus=%d", options.min_gpus, options.max_gpus)
  end
end

local YES_NO = { yes = true, no = false }
local FLAGS = { share = true, late = true, graphs = true, summary = true, checkpoints = true }

-- Returns the key and the value of "key=value"; `check` refuses a text that is not a value of its key.
local function read_item(item)
  local key, text = item:match("^([^=]*)=(.*)$")
  if not key then
    return item, FLAGS[item] or ""
  elseif FLAGS[key] and YES_NO[text] ~= nil then
    return key, YES_NO[text]
  elseif key ~= "model" and text:find("^-?%d+$") then
    return key, tonumber(text)
  end
  return key, text
end

-- Returns the options in a flag or in CADENZA, or nil and the reason. Slurm passes a bare flag as "(null)".
local function from_text(text)
  local options = { share = true }
  if text == "off" then
    return { share = false }
  elseif text == "" or text == "(null)" then
    return options
  end
  for item in (text .. ","):gmatch("([^,]*),") do
    local key, value = read_item(item)
    local wrong = key == "v" and unknown(key) or check({ [key] = value }) -- only the comment has a version
    if wrong then
      return nil, wrong
    end
    options[key] = value
  end
  local wrong = check(options)
  return not wrong and options or nil, wrong
end

-- Returns the options of a comment's cadenza key, nil without such a key, false and the reason for wrong options.
local function from_members(members)
  local own
  for _, member in ipairs(members) do
    if member.key == "cadenza" then
      if own then
        return false, "there are two cadenza keys"
      end
      own = member
    end
  end
  if not own then
    return nil
  elseif type(own.value) ~= "table" or not own.value.members then
    return false, "cadenza must be an object such as {\"share\":true}"
  end
  local options = { share = true }
  for _, member in ipairs(own.value.members) do
    options[member.key] = member.value
  end
  options.held, options.why = nil, nil
  local wrong = check(options)
  if wrong then
    return false, wrong
  end
  return options
end

local function write_options(options)
  local parts = {}
  for _, key in ipairs(KEYS) do
    local value = options[key]
    if value ~= nil then
      parts[#parts + 1] = '"' .. key .. '":' .. (type(value) == "string" and quote(value) or tostring(value))
    end
  end
  return "{" .. table.concat(parts, ",") .. "}"
end

-- Returns a comment as {text=, members= (nil for plain text), options=}, or nil and the reason to refuse it.
local function read_comment(text)
  local members, syntax = read_object(text)
  if not members then
    if text:find("^%s*{") and text:find("cadenza", 1, true) then
      return nil, "it names cadenza but is not JSON: " .. syntax
    end
    return { text = text }
  end
  local options, wrong = from_members(members)
  if options == false then
    return nil, wrong
  end
  return { text = text, members = members, options = options }
end

-- Our key comes first and in one form only, so that every reader finds the same.
local function merge(comment, options)
  local parts = { '{"cadenza":' .. write_options(options) }
  for _, member in ipairs(comment.members or {}) do
    if member.key ~= "cadenza" then
      parts[#parts + 1] = comment.text:sub(member.start, member.last)
    end
  end
  if not comment.members and comment.text ~= "" then
    parts[#parts + 1] = '"comment":' .. quote(comment.text)
  end
  return table.concat(parts, ",") .. "}"
end

-- Files --------------------------------------------------------------------------------------------------------

local function read_file(path)
  local file = io.open(path, "r")
  local text = file and file:read("*a")
  if file then
    file:close()
  end
  return text or ""
end

-- Returns {partitions={NAME=true}, lanes=N}; read at each submission, because Lua cannot detect a change of the file.
local function read_settings()
  local settings = { partitions = {}, lanes = 2 }
  -- slurmctld holds its locks while a script of this kind runs: one small file is read, and no other program is asked.
  for line in read_file(cadenza.settings_file):gmatch("[^\n]+") do
    local key, value = line:match("^%s*([%w_]+)%s*=%s*(.-)%s*$")
    if key == "partitions" then
      for name in value:gmatch("[^,%s]+") do
        settings.partitions[name] = true
      end
    elseif key == "lanes" and value:find("^%d+$") then
      settings.lanes = tonumber(value)
    elseif not line:find("^%s*#") and line:find("%S") then
      slurm.log_error("cadenza: %s: not understood: %s", cadenza.settings_file, line)
    end
  end
  return settings
end

-- The job ------------------------------------------------------------------------------------------------------

local function is_set(number)
  return number ~= nil and number < NO_VALUE
end

local function flag_of(job)
  local environment = job.spank_job_env
  for index = 0, environment and job.spank_job_env_size - 1 or -1 do
    local entry = environment[index]
    if entry and entry:sub(1, #SPANK_OPTION) == SPANK_OPTION then
      return entry:sub(#SPANK_OPTION + 1), "--cadenza"
    end
  end
  -- Slurm has the environment of batch jobs only, and logs an error when another job's is read.
  local twin = job.script and job.environment and job.environment["CADENZA"]
  if twin and twin ~= "" then
    return twin, "CADENZA"
  end
end

local function partition_names(job, partitions)
  -- A job without a partition gets the default one only after this script.
  if job.partition and job.partition ~= "" then
    local names = {}
    for name in job.partition:gmatch("[^,]+") do
      names[#names + 1] = name
    end
    return names
  end
  for name, partition in pairs(partitions or {}) do
    if partition.flag_default == 1 then
      return { name }
    end
  end
  return {}
end

local function count_managed(names, settings)
  local count = 0
  for _, name in ipairs(names) do
    count = count + (settings.partitions[name] and 1 or 0)
  end
  return count
end

local function asks_for_gpus(job)
  -- Each form of a request is in one of these by now: --gres in the first, --gpus in the second.
  for _, field in ipairs({ "tres_per_node", "tres_per_job", "tres_per_task", "tres_per_socket" }) do
    if job[field] and job[field]:find("gpu", 1, true) then
      return true
    end
  end
  return false
end

-- Only a job that Slurm cannot spread over several nodes may run in any lane.
local function may_get_several_nodes(job)
  if is_set(job.max_nodes) and job.max_nodes > 0 then
    return job.max_nodes > 1
  elseif is_set(job.min_nodes) and job.min_nodes > 1 then
    return true
  end
  -- Without -N Slurm may spread the tasks over nodes, and with them the GPUs of --gpus and --gpus-per-task.
  return (is_set(job.num_tasks) and job.num_tasks > 1) or job.tres_per_job ~= nil or job.tres_per_task ~= nil
end

local function refusal_reason(job, names, managed)
  if job.cron_job then -- before the next: scrontab sets the offset to 0
    -- Slurm refuses every update of a cron job, and a move needs some.
    return "cron jobs are not shared"
  elseif is_set(job.het_job_offset) then
    -- Slurm suspends and requeues a heterogeneous job as a whole only.
    return "heterogeneous jobs are not shared"
  elseif WHOLE_NODES[job.shared] then
    return "--exclusive asks for whole nodes"
  elseif not asks_for_gpus(job) then
    return "it asks for no GPUs"
  -- Slurm starts it in any of them, and where Cadenza manages none there are no lanes and no agents.
  elseif #names > 1 and managed < #names then
    return "it names several partitions and not all are managed"
  end
end

-- Returns the terms that a constraint joins by & outside of parentheses and brackets; nil for alternatives.
local function terms_of(features)
  local terms, depth, start = {}, 0, 1
  for at = 1, #features do
    local character = features:sub(at, at)
    if character:find("[%(%[]") then
      depth = depth + 1
    elseif character:find("[%)%]]") then
      depth = depth - 1
    elseif depth == 0 and character == "|" then
      return nil
    elseif depth == 0 and character == "&" then
      terms[#terms + 1], start = features:sub(start, at - 1), at + 1
    end
  end
  terms[#terms + 1] = features:sub(start)
  return terms
end

local function names_a_lane(features)
  return features:find("%f[%w_.-]lane%d+%f[^%w_.-]") ~= nil
end

-- Returns a constraint with the term `wanted`, or nil where that cannot be added, as Slurm's syntax has no counts in
-- lists and one level of parentheses, or where the constraint names lanes otherwise. `fits`: a term that may stand there.
local function with_feature(features, wanted, fits)
  if not features or features == "" then
    return wanted
  end
  local terms = terms_of(features)
  if not terms then
    local plain = not features:find("[%[%]()*]") and not names_a_lane(features) and not wanted:find("|", 1, true)
    return plain and "(" .. features .. ")&" .. wanted or nil
  end
  local found = false
  for _, term in ipairs(terms) do
    if term == wanted or (fits and term:find(fits)) then
      found = true
    elseif names_a_lane(term) or term:find("[%[%]*]") or (term:find("(", 1, true) and wanted:find("|", 1, true)) then
      return nil
    end
  end
  return found and features or features .. "&" .. wanted
end

local function one_lane(lanes)
  local names = {}
  for lane = 0, lanes - 1 do
    names[#names + 1] = "lane" .. lane
  end
  -- Brackets ask for the same one of the features on all nodes (sbatch(1), --constraint): GPUs of two lanes of a host
  -- would be the same GPUs.
  return #names > 1 and "[" .. table.concat(names, "|") .. "]" or names[1]
end

-- Pins both constraints of a job, --constraint and --prefer, which comes before it. Returns the one that cannot be.
local function pin(job, wanted, fits)
  for _, field in ipairs({ "features", "prefer" }) do
    local before = job[field]
    if field == "features" or (before and before ~= "") then
      local features = with_feature(before, wanted, fits)
      if not features then
        return before
      elseif features ~= before then
        job[field] = features
      end
    end
  end
end

-- Jobs that do not share run in lane 0 only; returns the reason if one cannot be kept there. Hosts with one lane need no
-- feature, here and below.
local function keep_to_lane_0(job, settings)
  local features = settings.lanes > 1 and pin(job, "lane0")
  if features then
    return string.format("its constraint '%s' cannot be combined with lane0, where jobs run that do not share: "
      .. "join features by & or |", features)
  end
end

-- Pins a job that shares; returns the reason if it cannot be pinned. One without a script has its user at a
-- terminal: it starts in lane 0, where it need not wait for a lease, unless it names another lane.
local function admit(job, settings)
  local wanted = not job.script and "lane0" or (may_get_several_nodes(job) and one_lane(settings.lanes))
  if settings.lanes > 1 and wanted and pin(job, wanted, "^lane%d+$") then
    return "its constraint cannot be combined with a lane"
  end
end

local function refuse(job, reason)
  slurm.user_msg("cadenza: " .. reason)
  slurm.log_info("cadenza: a request of uid %s is refused: %s", tostring(job.user_id), reason)
  return slurm.ERROR
end

-- Returns the comment's options, overridden by the flag or the environment; nil without any; false and the reason.
local function requested_options(job, comment)
  local text, source = flag_of(job)
  if not text then
    return comment.options
  end
  local flag, wrong = from_text(text)
  if not flag then
    return false, string.format("%s=%s: %s", source, text, wrong)
  elseif not flag.share and not comment.options then
    return nil
  end
  local options = {}
  for _, part in ipairs({ comment.options or {}, flag }) do
    for key, value in pairs(part) do
      options[key] = value
    end
  end
  wrong = check(options)
  return not wrong and options, wrong
end

local function leave_alone(job, options, reason)
  options.share, options.why = false, reason
  slurm.log_info("cadenza: job '%s' of uid %s is not shared: %s", tostring(job.name), tostring(job.user_id), reason)
  slurm.user_msg("cadenza: this job is left alone: " .. reason)
end

-- What an opted-in job may meet later, said while its user looks. It goes to sbatch's standard error, and has no number
-- that a script could take for the job's.
local function announce(job, options)
  -- 0 is --no-requeue; without a word of the user JobRequeue of slurm.conf decides.
  if job.script and job.requeue ~= 0 and options.checkpoints ~= false then
    slurm.user_msg("cadenza: once this job keeps checkpoints it may make way for others; it comes back by itself. "
      .. "`cadenza why JOBID` tells")
  end
end

local function submit(job, partitions)
  local comment, bad = read_comment(job.comment or "")
  if not comment then
    return refuse(job, "comment: " .. bad)
  end
  local options, wrong = requested_options(job, comment)
  if options == false then
    return refuse(job, wrong)
  end
  local settings, names = read_settings(), partition_names(job, partitions)
  local managed = count_managed(names, settings)
  if options and options.share then
    options.v = 1
    local reason = refusal_reason(job, names, managed) or (managed > 0 and admit(job, settings))
    if reason then
      leave_alone(job, options, reason)
    end
  end
  if options then
    options.v = 1
    -- A SPANK option is in no answer of squeue or scontrol: only the comment tells it to the service.
    local text = merge(comment, options)
    if #text > COMMENT_BYTES then
      return refuse(job, string.format("the comment would take %d bytes of Slurm's %d: shorten it", #text, COMMENT_BYTES))
    end
    job.comment = text
  end
  if managed > 0 and not (options and options.share) then
    local unpinned = keep_to_lane_0(job, settings)
    if unpinned then
      return refuse(job, unpinned)
    end
  elseif managed > 0 then
    announce(job, options)
  end
  return slurm.SUCCESS
end

-- Updates ------------------------------------------------------------------------------------------------------

local function is_pending(record)
  return (record.job_state or 0) % 256 == 0 -- JOB_PENDING is 0; the higher bits are flags
end

-- Returns the comment that an update leaves, with our key in its one form, or nil and the reason to refuse it. Without
-- our key a job that had it shares no more: it says so, because otherwise the plugin would go by the flag.
local function updated_comment(job, record)
  local comment, bad = read_comment(job.comment or record.comment or "")
  if not comment then
    return not job.comment and { text = "" } or nil, bad
  end
  local before = job.comment and not comment.options and read_comment(record.comment or "")
  if before and before.options then
    comment.options = { share = false }
  end
  if job.comment and comment.options then
    comment.options.v = 1
    local text = merge(comment, comment.options)
    if #text > COMMENT_BYTES then
      return nil, string.format("it would take %d bytes of Slurm's %d", #text, COMMENT_BYTES)
    end
    job.comment = text
  end
  return comment
end

-- The constraints after an update. What we added for one lane goes when the job no longer shares.
local function constraints(job, record, lanes, shares)
  local features = job.features or record.features or ""
  if not shares and not job.features then
    local ours = one_lane(lanes)
    for _, form in ipairs({ "&" .. ours, ours }) do
      local first, last = features:find(form, 1, true)
      if first and last == #features then
        features = features:sub(1, first - 1)
      end
    end
  end
  return { features = features, prefer = job.prefer or record.prefer or "" }
end

-- What an owner may not do at submission is no update either: leave lane 0 without sharing, or span lanes.
local function modify(job, record, partitions)
  local comment, bad = updated_comment(job, record)
  if not comment then
    return refuse(job, "comment: " .. bad)
  end
  local settings = read_settings()
  local names = partition_names(job.partition and job or record, partitions)
  -- Slurm itself refuses other features for a job that runs.
  if not is_pending(record) or count_managed(names, settings) == 0 then
    return slurm.SUCCESS
  end
  local shares, unpinned = comment.options ~= nil and comment.options.share
  local wanted = constraints(job, record, settings.lanes, shares)
  if not shares then
    unpinned = keep_to_lane_0(wanted, settings)
  elseif settings.lanes > 1 and (names_a_lane(record.features or "") or may_get_several_nodes(job))
      and pin(wanted, one_lane(settings.lanes), "^lane%d+$") then
    unpinned = "its constraint cannot be combined with a lane"
  end
  if unpinned then
    return refuse(job, unpinned)
  end
  for _, field in ipairs({ "features", "prefer" }) do
    if wanted[field] ~= (job[field] or record[field] or "") then
      job[field] = wanted[field]
    end
  end
  return slurm.SUCCESS
end

-- An error of this script must not keep users from submitting.
function slurm_job_submit(job, partitions, uid)
  local ok, result = pcall(submit, job, partitions)
  if ok then
    return result
  end
  slurm.log_error("cadenza: a job of uid %s is not changed: %s", tostring(uid), tostring(result))
  return slurm.SUCCESS
end

-- Updates by others than the owner, as by the service, are not changed.
function slurm_job_modify(job, record, partitions, uid)
  local ok, result = pcall(function()
    -- slurmctld calls this for the updates of the service as well, which change nodes and sizes of jobs that move.
    return uid == record.user_id and modify(job, record, partitions) or slurm.SUCCESS
  end)
  if ok then
    return result
  end
  slurm.log_error("cadenza: an update by uid %s is not changed: %s", tostring(uid), tostring(result))
  return slurm.SUCCESS
end
