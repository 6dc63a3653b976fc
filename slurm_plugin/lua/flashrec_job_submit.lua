-- FlashRecovery's part of a site's job_submit.lua: who gets into the pool of spare nodes.
--
--   local flashrec = dofile("/etc/slurm/flashrec_job_submit.lua")
--   flashrec.setup({ plugstack = "/etc/slurm/plugstack.conf.d/flashrecovery.conf" })
--   function slurm_job_submit(job, partitions, uid)
--     local rc = flashrec.job_submit(job, partitions, uid)
--     if rc ~= slurm.SUCCESS then return rc end
--     ... the site's own rules ...
--     return slurm.SUCCESS
--   end
--   function slurm_job_modify(job, record, partitions, uid)  -- likewise, with flashrec.job_modify
--
-- Runs inside slurmctld, with its locks held: no command is started, no file is read more than once a minute, and jobs
-- that have nothing to do with the pool cost one comparison of strings. Rules:
--   * a job with the pool's reservation is refused unless it is a companion job: made by flashrec for a running job of
--     the same user, one node, within the limits (docs/reference/plugin-contract.md);
--   * an admitted one gets `flashrec:spare-for=JOBID` as its admin comment, which users cannot set, and ends no later
--     than that job. Only the admin comment is ever trusted, never a job's name or comment;
--   * whatever goes wrong in here: other jobs pass, the pool stays closed.
-- Limits are the arguments of our line in plugstack.conf: pool= max_per_job= max_per_user= max_per_partition=.
-- Lua 5.1 to 5.4.

local M = {}

local MARK = "flashrec:spare-for="
local RUNNING, SUSPENDED, COMPLETING = 1, 2, 0x8000
local UNSET, INFINITE = 4294967294, 4294967295
local YEAR_S = 300 * 86400 -- an end further away than this means no limit

local settings = { plugstack = "/etc/slurm/plugstack.conf", pool = "flashspare", cache_s = 60, admins = {} }
local cached = nil -- { at, limits or nil, problem }
local admitted = {} -- admissions that slurm.jobs does not show yet; see `ledger`

-- plugstack: the file with our line. pool: its name where that file cannot be read. cache_s: how long limits are kept.
-- admins: user ids besides root that may do everything.
function M.setup(wanted)
  for key, value in pairs(wanted or {}) do
    settings[key] = value
  end
  cached, admitted = nil, {}
end

-- ---- limits --------------------------------------------------------------------------------------------------------

-- Text of plugstack.conf -> limits, or nil and what is wrong.
function M.read_limits(text)
  for line in (text .. "\n"):gmatch("(.-)\r?\n") do
    local words = {}
    for word in line:gsub("#.*", ""):gmatch("%S+") do
      words[#words + 1] = word
    end
    if (words[1] == "optional" or words[1] == "required") and (words[2] or ""):match("flashrecovery%.so$") then
      local limits = { pool = settings.pool, max_per_job = 2, max_per_user = 4 }
      for index = 3, #words do
        local key, value = words[index]:match("^([%w_]+)=(.*)$")
        if key == "pool" then
          limits.pool = value
        elseif key == "max_per_job" or key == "max_per_user" or key == "max_per_partition" then
          if not value:match("^%d+$") then
            return nil, key .. " is not a number"
          end
          limits[key] = tonumber(value)
        end
      end
      return limits
    end
  end
  return nil, "no line for flashrecovery.so"
end

local function limits_now()
  local now = os.time()
  if cached == nil or now - cached.at >= settings.cache_s or now < cached.at then
    local limits, problem
    local file, why = io.open(settings.plugstack, "r")
    if file == nil then
      problem = tostring(why)
    else
      local text = file:read(65536) or ""
      file:close()
      limits, problem = M.read_limits(text)
    end
    cached = { at = now, limits = limits, problem = problem }
  end
  return cached.limits, cached.problem
end

local function pool_name()
  local limits = limits_now()
  return limits and limits.pool or settings.pool
end

-- ---- small things --------------------------------------------------------------------------------------------------

-- Is `pool` among the reservations asked for? Slurm takes a list.
local function asks_for(pool, reservation)
  for name in tostring(reservation or ""):gmatch("[^,%s]+") do
    if name == pool then
      return true
    end
  end
  return false
end

local function is_set(value)
  return value ~= nil and value ~= "" and value ~= UNSET and value ~= 65534
end

local function is_admin(uid)
  if uid == 0 then
    return true
  end
  for _, known in ipairs(settings.admins) do
    if uid == known then
      return true
    end
  end
  return false
end

local function served_job(text)
  local number = tostring(text or ""):match("^flashrec:spare%-for=(%d+)$")
  return number and #number <= 10 and tonumber(number) or nil
end

local function job_of(id)
  local jobs = slurm.jobs or {}
  return jobs[string.format("%d", id)] or jobs[id]
end

local function base_state(job)
  return (tonumber(job.job_state) or -1) % 256
end

local function is_running(job)
  local state = tonumber(job.job_state) or -1
  return state % 256 == RUNNING and math.floor(state / COMPLETING) % 2 == 0
end

local function refuse(text)
  return { refused = "flashrec: " .. text }
end

-- ---- limits against what is there ------------------------------------------------------------------------------------

-- How many companion jobs exist: of a job, of a user, of jobs of a partition.
local function count(main_id, user_id, partition)
  local of_job, of_user, of_partition = 0, 0, 0
  for _, job in pairs(slurm.jobs or {}) do
    local served = base_state(job) <= SUSPENDED and served_job(job.admin_comment)
    if served then
      local main = job_of(served)
      of_job = of_job + (served == main_id and 1 or 0)
      of_user = of_user + (job.user_id == user_id and 1 or 0)
      of_partition = of_partition + ((main or job).partition == partition and 1 or 0)
    end
  end
  return of_job, of_user, of_partition
end

-- Slurm renews `slurm.jobs` only when a job has changed in a later second than the last time (measured, 22.05), so what
-- we admitted a moment ago may be missing in it, on a quiet cluster for hours: as long as it is the same table we count
-- our own admissions as well. One that came to nothing counts until then, too; the manager renews the table before it asks.
local function ledger()
  local kept = {}
  for _, entry in ipairs(admitted) do
    if entry.view == slurm.jobs then
      kept[#kept + 1] = entry
    end
  end
  admitted = kept
  return kept
end

local function over_limit(limits, main_id, main, user_id)
  local of_job, of_user, of_partition = count(main_id, user_id, main.partition)
  for _, entry in ipairs(ledger()) do
    of_job = of_job + (entry.main_id == main_id and 1 or 0)
    of_user = of_user + (entry.user_id == user_id and 1 or 0)
    of_partition = of_partition + (entry.partition == main.partition and 1 or 0)
  end
  local checks = {
    { of_job, limits.max_per_job, "max_per_job", string.format("job %d", main_id) },
    { of_user, limits.max_per_user, "max_per_user", "this user" },
    { of_partition, limits.max_per_partition, "max_per_partition", "partition " .. tostring(main.partition) },
  }
  for _, check in ipairs(checks) do
    if check[2] ~= nil and check[1] >= check[2] then
      local text = "pool %s: %s holds %d spare nodes, and no more than %d are allowed (%s)"
      return text:format(limits.pool, check[4], check[1], check[2], check[3])
    end
  end
end

-- ---- admission -------------------------------------------------------------------------------------------------------

-- What makes a companion job: '' or what is wrong with it.
local function shape_problem(job, pool)
  if job.reservation ~= pool then
    return "a companion job asks for this reservation alone"
  elseif job.script ~= nil and job.script ~= "" then
    return "a companion job is made with salloc and has no script"
  elseif job.min_nodes ~= 1 or job.max_nodes ~= 1 then
    return "a companion job has --nodes=1"
  elseif is_set(job.array_inx) or is_set(job.dependency) then
    return "a companion job has no array and no dependency"
  end
  return ""
end

-- Never beyond the end of the job that it serves.
local function limit_time(job, main, now)
  local left_s = (tonumber(main.end_time) or 0) - now
  if left_s <= 0 or left_s > YEAR_S then
    return
  end
  local minutes = math.max(1, math.ceil(left_s / 60))
  local wanted = tonumber(job.time_limit) or UNSET
  if wanted == UNSET or wanted == INFINITE or wanted > minutes then
    job.time_limit = minutes
  end
end

local function admit(job, submit_uid)
  local limits, problem = limits_now()
  local pool = limits and limits.pool or settings.pool
  local main_id = served_job(job.comment)
  if main_id == nil then
    return refuse(
      ("reservation %s is a pool of spare nodes: only flashrec takes nodes from it, when a job has lost one. "):format(
        pool
      ) .. "Submit without --reservation=" .. pool
    )
  end
  if limits == nil then
    return refuse(("pool %s is closed: its limits cannot be read (%s: %s)"):format(pool, settings.plugstack, problem))
  end
  local text = shape_problem(job, pool)
  local main = job_of(main_id)
  if text ~= "" then
    return refuse("pool " .. pool .. ": " .. text)
  elseif main == nil or not is_running(main) then
    -- Perhaps it is only missing in an old view; the owner renews that with `scontrol update JobId=… TimeLimit=+0`.
    return refuse(("pool %s: job %d is not running"):format(pool, main_id))
  elseif main.user_id ~= job.user_id or submit_uid ~= job.user_id then
    return refuse(("pool %s: job %d is not yours"):format(pool, main_id))
  elseif served_job(main.admin_comment) then
    return refuse(("pool %s: job %d is itself a companion job"):format(pool, main_id))
  end
  text = over_limit(limits, main_id, main, job.user_id)
  if text ~= nil then
    return refuse(text)
  end
  limit_time(job, main, os.time())
  job.admin_comment = MARK .. string.format("%d", main_id)
  admitted[#admitted + 1] =
    { view = slurm.jobs, main_id = main_id, user_id = job.user_id, partition = main.partition }
end

local function judge_submit(job, submit_uid)
  if asks_for(pool_name(), job.reservation) then
    if is_admin(submit_uid) then
      return nil
    end
    return admit(job, submit_uid)
  end
  if tostring(job.admin_comment or ""):match("^flashrec:") and not is_admin(submit_uid) then
    return refuse("an admin comment that begins with flashrec: is not for users")
  end
end

local FROZEN = { "min_nodes", "max_nodes", "req_nodes", "num_tasks", "min_cpus", "max_cpus", "partition", "features",
  "dependency" }

local function judge_modify(job, record, uid)
  if is_admin(uid) then
    return nil
  end
  local pool = pool_name()
  if asks_for(pool, job.reservation) then
    return refuse(("reservation %s is a pool of spare nodes: no job is moved into it"):format(pool))
  elseif is_set(job.admin_comment) then
    return refuse("the admin comment of a job is not for users")
  elseif served_job(record.admin_comment) or asks_for(pool, record.reservation) then
    if is_set(job.reservation) then
      return refuse("a companion job stays in its reservation")
    end
    for _, field in ipairs(FROZEN) do
      if is_set(job[field]) then
        return refuse(("%s of a companion job cannot be changed"):format(field))
      end
    end
    -- Slurm lets users raise the limit of a pending job, beyond the end of the job that it serves.
    if is_set(job.time_limit) and (tonumber(job.time_limit) or INFINITE) > (tonumber(record.time_limit) or 0) then
      return refuse("the time limit of a companion job is not raised by users")
    end
  end
end

-- ---- what the glue calls -----------------------------------------------------------------------------------------------

-- Run a judgement; an error inside it closes the pool and nothing else.
local function guarded(tell, concerns_pool, judge, ...)
  local ok, verdict = pcall(judge, ...)
  if not ok then
    pcall(slurm.log_error, "flashrec: job_submit: %s", tostring(verdict))
    local known, concerns = pcall(concerns_pool)
    verdict = nil
    if not known or concerns then
      verdict = refuse("the pool of spare nodes is closed: the filter failed, see slurmctld's log")
    end
  end
  if verdict ~= nil then
    pcall(slurm[tell], "%s", verdict.refused)
    return slurm.ERROR
  end
  return slurm.SUCCESS
end

function M.job_submit(job, _, submit_uid)
  return guarded("log_user", function()
    local known = cached and cached.limits and cached.limits.pool
    return asks_for(settings.pool, job.reservation) or asks_for(known, job.reservation)
  end, judge_submit, job, submit_uid)
end

function M.job_modify(job, record, _, submit_uid)
  -- In here Slurm passes no text on to the user.
  return guarded("log_info", function()
    return is_set(job.reservation) or is_set(job.admin_comment)
  end, judge_modify, job, record, submit_uid)
end

return M
