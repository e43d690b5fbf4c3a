// Who looks at the page, and what they may do. The service decides; here only buttons that it would refuse are left out.

import { get, post } from "./api.js";
import { announce, confirm } from "./dialogs.js";

let me = { user: "", role: "read" };

export async function introduce() {
  me = await get("/api/me");
  document.documentElement.dataset.role = me.role;
  return me;
}

export const maySubmit = () => me.role !== "read";
export const mayChange = (run) => me.role === "admin" || (maySubmit() && run.user === me.user);

export async function signOut() {
  const sure = await confirm({ title: "Sign out?", text: `This browser forgets ${me.user}. To come back, type \`ringctl serve link\` and open what it prints.`, action: "Sign out" });
  if (!sure) return;
  try {
    await post("/logout");
    location.assign("/");
  } catch (error) {
    announce(error.message, { bad: true, fix: error.fix });
  }
}
