// Plays a session's steps over one stream of Schedule: reads each as a line of JSON, and prints its result as one,
// or its error.
// Usage: node schedule.js FOLDER_OF_PROTOS ADDRESS
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");
const readline = require("readline");

const [protos, address] = process.argv.slice(2);
const options = { includeDirs: [protos], keepCase: true, longs: String, enums: String, bytes: String };
const { AllocatorService } = grpc.loadPackageDefinition(loader.loadSync("kvpool/v1/allocator.proto", options)).kvpool.v1;
const stream = new AllocatorService(address, grpc.credentials.createInsecure()).Schedule();
stream.on("data", (result) => console.log(JSON.stringify(result)));
stream.on("error", (error) => {
  console.log(JSON.stringify({ error: error.details }));
  process.exit();
});
readline
  .createInterface({ input: process.stdin })
  .on("line", (line) => stream.write(JSON.parse(line)))
  .on("close", () => stream.end());
