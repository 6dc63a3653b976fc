local H = dofile((arg[0]:match("^(.*/)") or "./") .. "harness.lua")

local USER, OTHER, UNSET = 1000, 1001, 4294967294
local clock = 1000000

os.time = function()
  return clock
end

-- The module with a plugstack.conf of these arguments (nil: no such file) and these running jobs.
local function pool(arguments, jobs)
  local M = H.load("flashrec_job_submit.lua")
  local path = os.tmpname()
  if arguments == nil then
    os.remove(path)
  else
    local file = io.open(path, "w")
    file:write("# optional old/flashrecovery.so pool=old\noptional /usr/lib/other.so x=1\n",
      "optional /usr/lib/flashrecovery.so ", arguments, " # limits\n")
    file:close()
  end
  M.setup({ plugstack = path })
  slurm.jobs = jobs or { ["7"] = { user_id = USER, job_state = 1, partition = "main", end_time = clock + 3600 } }
  return M, path
end

local function companion(changes)
  local job = { reservation = "flashspare", comment = "flashrec:spare-for=7", user_id = USER, min_nodes = 1,
    max_nodes = 1, time_limit = UNSET }
  for key, value in pairs(changes or {}) do
    job[key] = value ~= "nil" and value or nil
  end
  return job
end

local function admitted(M, job, uid)
  H.equal(M.job_submit(job, {}, uid or USER), slurm.SUCCESS, table.concat(H.said, "; "))
end

local function refused(M, job, pattern, uid)
  H.equal(M.job_submit(job, {}, uid or USER), slurm.ERROR, "return code")
  H.match(H.said[#H.said], pattern)
end

H.case("a companion job is admitted, marked, and ends with its job", function()
  local M, job = pool("pool=flashspare max_per_job=2"), companion()
  admitted(M, job)
  H.equal(job.admin_comment, "flashrec:spare-for=7")
  H.equal(job.time_limit, 60)
end)

H.case("a shorter time limit is kept, a longer one cut", function()
  local M, short, long = pool("pool=flashspare"), companion({ time_limit = 5 }), companion({ time_limit = 500 })
  admitted(M, short)
  admitted(M, long)
  H.equal(short.time_limit, 5)
  H.equal(long.time_limit, 60)
end)

H.case("a job without end gives no limit", function()
  local M = pool("pool=flashspare", { ["7"] = { user_id = USER, job_state = 1, partition = "main",
    end_time = clock + 365 * 86400 } })
  local job = companion()
  admitted(M, job)
  H.equal(job.time_limit, UNSET)
end)

H.case("ordinary jobs pass and are not changed", function()
  local job = { user_id = USER, comment = "flashrec:spare-for=7", reservation = "other" }
  admitted(pool("pool=flashspare"), job)
  H.equal(job.admin_comment, nil)
  admitted(pool(nil), { user_id = USER })
  admitted(pool("pool=flashspare"), { user_id = USER, reservation = "flashspare2,my-flashspare" })
end)

H.case("an ordinary job with the pool's reservation is refused", function()
  refused(pool("pool=flashspare"), companion({ comment = "nil" }), "Submit without %-%-reservation=flashspare")
  refused(pool("pool=flashspare"), companion({ comment = "nil", reservation = "a,flashspare" }), "pool of spare nodes")
  refused(pool("pool=p2"), companion({ comment = "nil", reservation = "p2" }), "reservation p2 is a pool")
end)

H.case("root and the site's administrators may use the pool", function()
  local M, path = pool("pool=flashspare")
  admitted(M, companion({ comment = "nil" }), 0)
  refused(M, companion({ comment = "nil" }), "pool", 64030)
  M.setup({ admins = { 64030 }, plugstack = path })
  admitted(M, companion({ comment = "nil" }), 64030)
end)

for _, forged in ipairs({ "flashrec:spare-for=7 ", " flashrec:spare-for=7", "flashrec:spare-for=7\nflashrec:spare-for=8",
  "x\nflashrec:spare-for=7", "flashrec:spare-for=", "flashrec:spare-for=7x", "flashrec:spare-for=-7", "7",
  "flashrec:spare-for=77777777777", "flashrec:spare-for=7\0" }) do
  H.case("a forged comment: " .. string.format("%q", forged):gsub("\n", "n"), function()
    refused(pool("pool=flashspare"), companion({ comment = forged }), "only flashrec takes nodes")
  end)
end

H.case("somebody else's job has no spare to give away", function()
  local M = pool("pool=flashspare")
  refused(M, companion({ user_id = OTHER }), "job 7 is not yours", OTHER)
  refused(M, companion(), "job 7 is not yours", OTHER)
end)

H.case("the job must run", function()
  for _, state in ipairs({ 0, 2, 3, 4, 5, 1 + 0x8000, 256 * 0x80 + 1 }) do
    local M = pool("pool=flashspare", { ["7"] = { user_id = USER, job_state = state, partition = "main" } })
    refused(M, companion(), "job 7 is not running")
  end
  refused(pool("pool=flashspare", {}), companion(), "job 7 is not running")
end)

H.case("a companion job serves no companion job", function()
  local M = pool("pool=flashspare", { ["7"] = { user_id = USER, job_state = 1, partition = "main",
    admin_comment = "flashrec:spare-for=3" } })
  refused(M, companion(), "itself a companion job")
end)

H.case("more than one node, a script, an array, a dependency", function()
  local M = pool("pool=flashspare")
  refused(M, companion({ max_nodes = 2 }), "nodes=1")
  refused(M, companion({ min_nodes = UNSET, max_nodes = UNSET }), "nodes=1")
  refused(M, companion({ script = "#!/bin/sh\n" }), "no script")
  refused(M, companion({ array_inx = "0-9" }), "no array")
  refused(M, companion({ dependency = "expand:7" }), "no dependency")
  refused(M, companion({ reservation = "flashspare,other" }), "this reservation alone")
end)

local function jobs_with(...)
  local jobs = {
    ["7"] = { user_id = USER, job_state = 1, partition = "main", end_time = clock + 3600 },
    ["8"] = { user_id = USER, job_state = 1, partition = "main", end_time = clock + 3600 },
    ["9"] = { user_id = OTHER, job_state = 1, partition = "big", end_time = clock + 3600 },
  }
  for index, main in ipairs({ ... }) do
    jobs[tostring(100 + index)] = { user_id = jobs[tostring(main)].user_id, job_state = 1, partition = "main",
      admin_comment = "flashrec:spare-for=" .. main }
  end
  return jobs
end

H.case("limit per job", function()
  refused(pool("pool=flashspare max_per_job=2", jobs_with(7, 7)), companion(), "job 7 holds 2 .*max_per_job")
  admitted(pool("pool=flashspare max_per_job=2", jobs_with(7, 8)), companion())
  refused(pool("pool=flashspare max_per_job=0", jobs_with()), companion(), "max_per_job")
end)

H.case("limit per user", function()
  refused(pool("pool=flashspare max_per_job=9 max_per_user=2", jobs_with(7, 8)), companion(), "user holds 2")
  admitted(pool("pool=flashspare max_per_job=9 max_per_user=2", jobs_with(7, 9)), companion())
end)

H.case("limit per partition of the jobs that are served", function()
  local arguments = "pool=flashspare max_per_job=9 max_per_user=9 max_per_partition=1"
  refused(pool(arguments, jobs_with(8)), companion(), "partition main holds 1")
  admitted(pool(arguments, jobs_with(9)), companion())
end)

H.case("limits hold without being asked for", function()
  refused(pool("pool=flashspare", jobs_with(7, 7)), companion(), "max_per_job")
end)

H.case("companion jobs that have ended do not count, pending ones do", function()
  local jobs = jobs_with(7, 7)
  jobs["101"].job_state = 3
  admitted(pool("pool=flashspare max_per_job=2", jobs), companion())
  jobs["101"].job_state = 0
  refused(pool("pool=flashspare max_per_job=2", jobs), companion(), "max_per_job")
end)

H.case("a comment that looks like ours does not count", function()
  local jobs = jobs_with(7)
  jobs["101"].admin_comment, jobs["101"].comment = nil, "flashrec:spare-for=7"
  admitted(pool("pool=flashspare max_per_job=1", jobs), companion())
end)

H.case("two in the same second: the second one sees the first, although slurm.jobs does not show it", function()
  local M = pool("pool=flashspare max_per_job=1")
  admitted(M, companion())
  refused(M, companion(), "job 7 holds 1")
  slurm.jobs = jobs_with() -- renewed, and the first has come to nothing
  admitted(M, companion())
end)

H.case("on a quiet cluster, where slurm.jobs stays as it is for hours, what was admitted counts", function()
  local M = pool("pool=flashspare max_per_job=1")
  admitted(M, companion())
  clock = clock + 7200
  slurm.jobs["7"].end_time = clock + 3600
  refused(M, companion(), "job 7 holds 1")
end)

H.case("limits that cannot be read close the pool and nothing else", function()
  refused(pool(nil), companion(), "closed: its limits cannot be read")
  refused(pool("pool=flashspare max_per_job=many"), companion(), "max_per_job is not a number")
  local M = pool(nil)
  refused(M, companion({ comment = "nil" }), "pool of spare nodes")
  admitted(M, { user_id = USER })
end)

H.case("limits are read again after a while", function()
  local M, path = pool("pool=flashspare max_per_job=9")
  admitted(M, companion())
  local file = io.open(path, "w")
  file:write("optional flashrecovery.so pool=flashspare max_per_job=0\n")
  file:close()
  clock = clock + 30
  admitted(M, companion())
  clock = clock + 31
  refused(M, companion(), "max_per_job")
end)

local function modify(M, changes, record, uid)
  local job = { min_nodes = UNSET, max_nodes = UNSET, num_tasks = UNSET, min_cpus = UNSET, max_cpus = UNSET }
  for key, value in pairs(changes) do
    job[key] = value
  end
  return M.job_modify(job, record or { job_id = 8, user_id = USER, job_state = 1 }, {}, uid or USER)
end

H.case("an error inside closes the pool and lets others pass", function()
  local M = pool("pool=flashspare")
  slurm.jobs = setmetatable({}, { __index = function() error("broken") end })
  refused(M, companion(), "the filter failed")
  H.match(table.concat(H.said), "broken")
  slurm.log_error, slurm.log_user = nil, nil
  H.equal(M.job_submit(companion(), {}, USER), slurm.ERROR)
  admitted(M, { user_id = USER })
end)

H.case("an error that every job meets closes the pool and lets others pass", function()
  local M = pool("pool=flashspare")
  local time = os.time
  os.time = function()
    error("broken")
  end
  local ordinary, wanted = M.job_submit({ user_id = USER }, {}, USER), M.job_submit(companion(), {}, USER)
  local changed = modify(M, { time_limit = 5 })
  os.time = time
  H.equal(ordinary, slurm.SUCCESS)
  H.equal(changed, slurm.SUCCESS)
  H.equal(wanted, slurm.ERROR)
end)

H.case("an admin comment of ours cannot be brought along", function()
  refused(pool("pool=flashspare"), { user_id = USER, admin_comment = "flashrec:spare-for=7" }, "not for users")
  admitted(pool("pool=flashspare"), { user_id = USER, admin_comment = "of the site" })
end)

-- ---- modify

local MARKED = { job_id = 101, user_id = USER, reservation = "flashspare", admin_comment = "flashrec:spare-for=7",
  time_limit = 60 }

H.case("no job is moved into the pool", function()
  local M = pool("pool=flashspare")
  H.equal(modify(M, { reservation = "flashspare" }), slurm.ERROR)
  H.match(H.said[1], "moved into")
  H.equal(modify(M, { reservation = "a,flashspare" }), slurm.ERROR)
  H.equal(modify(M, { reservation = "other" }), slurm.SUCCESS)
  H.equal(modify(M, { reservation = "flashspare" }, nil, 0), slurm.SUCCESS)
end)

H.case("nobody changes an admin comment", function()
  local M = pool("pool=flashspare")
  H.equal(modify(M, { admin_comment = "flashrec:spare-for=7" }), slurm.ERROR)
  H.equal(modify(M, { admin_comment = "x" }, MARKED), slurm.ERROR)
  H.equal(modify(M, { admin_comment = "x" }, MARKED, 0), slurm.SUCCESS)
end)

H.case("a companion job does not grow, move or leave", function()
  local M = pool("pool=flashspare")
  for _, change in ipairs({ { min_nodes = 2 }, { max_nodes = 0 }, { num_tasks = 100 }, { req_nodes = "n1" },
    { partition = "big" }, { dependency = "expand:8" }, { reservation = "other" } }) do
    H.equal(modify(M, change, MARKED), slurm.ERROR, (next(change)))
  end
  H.equal(modify(M, { time_limit = 5, comment = "x" }, MARKED), slurm.SUCCESS)
  H.equal(modify(M, { min_nodes = 2 }), slurm.SUCCESS, "an ordinary job")
end)

H.case("users do not raise the time limit of a companion job, while it is pending", function()
  local M = pool("pool=flashspare")
  H.equal(modify(M, { time_limit = 60 }, MARKED), slurm.SUCCESS)
  H.equal(modify(M, { time_limit = 61 }, MARKED), slurm.ERROR)
  H.equal(modify(M, { time_limit = 4294967295 }, MARKED), slurm.ERROR, "no limit")
  H.equal(modify(M, { time_limit = 61 }, MARKED, 0), slurm.SUCCESS, "root")
  H.equal(modify(M, { time_limit = 500 }), slurm.SUCCESS, "an ordinary job")
end)

H.finish()
