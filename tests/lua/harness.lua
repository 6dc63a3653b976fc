-- A handful of lines instead of a test framework: cases by name, each in a fresh module with a fresh fake `slurm`.

local H = { cases = {}, said = {} }
local here = arg[0]:match("^(.*/)") or "./"
local plugin = here .. "../../slurm_plugin/lua/"

function H.load(name)
  H.said = {}
  slurm = { SUCCESS = 0, ERROR = -1, jobs = {} }
  for _, level in ipairs({ "log_info", "log_error", "log_user" }) do
    slurm[level] = function(...)
      H.said[#H.said + 1] = string.format(...)
    end
  end
  return dofile(plugin .. name)
end

function H.case(name, run)
  H.cases[#H.cases + 1] = { name = name, run = run }
end

function H.equal(got, wanted, what)
  if got ~= wanted then
    error(string.format("%s: got %s, wanted %s", what or "value", tostring(got), tostring(wanted)), 2)
  end
end

function H.match(text, pattern)
  if not tostring(text):find(pattern) then
    error(string.format("%q does not match %q", tostring(text), pattern), 2)
  end
end

function H.finish()
  local failed = 0
  for _, case in ipairs(H.cases) do
    local ok, err = pcall(case.run)
    io.write(ok and "ok      " or "FAILED  ", case.name, ok and "" or ": " .. tostring(err), "\n")
    failed = failed + (ok and 0 or 1)
  end
  io.write(string.format("%d cases, %d failed\n", #H.cases, failed))
  os.exit(failed == 0 and #H.cases > 0 and 0 or 1)
end

return H
